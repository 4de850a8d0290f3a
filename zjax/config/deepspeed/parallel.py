"""Axes of the mesh, and what the backward pass recomputes."""

from zjax.config.deepspeed.conversion import AUTO, Conversion

CHECKPOINTS = "activation_checkpointing"


def convert_parallel(found: Conversion) -> None:
    """Reads the sizes of the mesh and `activation_checkpointing`."""
    _convert_tensor(found)
    _convert_pipeline(found)
    axes = {
        "sequence_parallel_size": "mesh__sequence",
        "data_parallel_size": "mesh__data",
    }
    for key, setting in axes.items():
        if size := found.take(key, 0):
            found.set(key, **{setting: size})
    _convert_experts(found)
    _convert_recomputation(found)


def _convert_tensor(found: Conversion) -> None:
    section = "tensor_parallel"
    nested = [f"{section}.{name}.tp_size" for name in ("tp", "tensor_parallel")]
    for key in (f"{section}.autotp_size", *nested):
        size = found.take(key, 0)
        if size and size > 1:
            found.set(key, mesh__tensor=size)
        else:
            found.skip(key, "one device holds each matrix")
    found.skip_rest(section, "names of dims place the matrices; see mesh.rules")


def _convert_pipeline(found: Conversion) -> None:
    stages = found.take("pipeline.stages", "auto", int, str)
    if isinstance(stages, int) and stages > 1:
        found.set("pipeline.stages", mesh__pipeline=stages)
    elif stages not in (1, AUTO):
        found.refuse("pipeline.stages", "use 1 or more, or auto", "is no number")
    if found.take("pipeline.activation_checkpoint_interval", 0):
        found.set("pipeline.activation_checkpoint_interval", model__remat="full")
    found.skip_rest("pipeline", "stages have equally many layers")


def _convert_experts(found: Conversion) -> None:
    section = "expert_parallel"
    if found.take(f"{section}.enabled", False):
        size = found.take(f"{section}.autoep_size", 1)
        found.set(f"{section}.enabled", "model.moe describes the experts")
        if size is not None:
            found.set(f"{section}.autoep_size", mesh__expert=size)
    found.skip_rest(section, "model.moe describes the experts")
    key = "use_data_before_expert_parallelism"
    found.skip(key, "the mesh has one order of its axes")


def _convert_recomputation(found: Conversion) -> None:
    key = f"{CHECKPOINTS}.cpu_checkpointing"
    if found.take(key, False):
        found.set(key, model__activation_memory="pinned_host", model__remat="full")
    else:
        found.skip(key, "inputs of layers stay on the devices")
    key = f"{CHECKPOINTS}.partition_activations"
    if found.take(key, False):
        found.derive(key, "activations are sharded as the mesh shards them")
    found.skip_rest(CHECKPOINTS, "model.remat says what is recomputed")
