"""What `zjax tune` chooses: microbatch, ZeRO stage, remat, mesh and offload.

The global batch stays, so that a tuned run learns what the given one does.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

from zjax.budget.mesh import possible_meshes
from zjax.budget.trial import Machine
from zjax.config import axes, schema
from zjax.config.batch import resolve_batch
from zjax.config.load import load_config
from zjax.errors import ConfigError
from zjax.sharding import mesh as meshes

REMATS = ("none", "elementwise", "attention_and_mlp", "attention", "full")
"""Policies of `model.remat`, the one that recomputes least first."""
Offload = Literal["none", "state", "blocks"]
"""What is stored in the memory of the host; `blocks` are parameters, besides state."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Args:
        microbatch_size: Sequences per device and microbatch; 0 where `elasticity` says.
        stage: ZeRO stage.
        remat: A value of `model.remat`.
        pipeline: Size of the mesh axis.
        sequence: The same.
        tensor: The same.
        offload: What is stored in the memory of the host.
    """

    microbatch_size: int
    stage: int
    remat: str
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    offload: Offload = "none"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run by path."""
        state = "derived" if self.offload == "none" else "pinned_host"
        blocks = "pinned_host" if self.offload == "blocks" else "derived"
        sizes = {axis: getattr(self, axis) for axis in axes.OPEN_AXES}
        return {
            "num_microbatches": 0,
            "microbatch_size": self.microbatch_size,
            "zero.stage": self.stage,
            "zero.memory": "device",
            "zero.optimizer_memory": state,
            "zero.parameter_memory": blocks,
            "zero.gradient_memory": "derived",
            "model.remat": self.remat,
            **{f"mesh.{axis}": size for axis, size in sizes.items()},
        }

    def apply(self, config: schema.Config) -> schema.Config:
        """The run with these settings."""
        return load_config(config, self.settings)


def with_batch(config: schema.Config, machine: Machine) -> schema.Config:
    """The run with its global batch size, from which the other two follow.

    Raises:
        ConfigError: The sizes do not fit the devices.
    """
    if config.elasticity.microbatch_sizes or config.global_batch_size:
        return dataclasses.replace(config, num_microbatches=0, microbatch_size=0)
    closed = dataclasses.replace(config, mesh=axes.close_axes(config.mesh))
    sizes = resolve_batch(config, _num_shards(closed, machine))
    return dataclasses.replace(
        config,
        global_batch_size=sizes.global_batch_size,
        num_microbatches=0,
        microbatch_size=0,
    )


def candidates(config: schema.Config, machine: Machine) -> Iterator[Candidate]:
    """All settings to choose from, of which some cannot work.

    Args:
        config: The run of `with_batch`; mesh axes above 1 stay as they are.
        machine: The devices.

    Yields:
        Candidates.
    """
    opened = dataclasses.replace(config, mesh=open_mesh(config.mesh))
    for mesh in possible_meshes(opened, machine):
        shards = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
        is_sharded = shards * mesh.sequence > 1
        stages = (0, 1, 2, 3) if is_sharded else (config.zero.stage,)
        sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
        for microbatch in microbatch_sizes(config, shards):
            for stage in stages:
                for remat in REMATS:
                    for offload in get_args(Offload):
                        yield Candidate(
                            microbatch, stage, remat, **sizes, offload=offload
                        )


def microbatch_sizes(config: schema.Config, num_shards: int) -> list[int]:
    """Sizes of a microbatch that divide the rows of a batch shard.

    Example:
        >>> microbatch_sizes(schema.Config(global_batch_size=48), num_shards=4)
        [1, 2, 3, 4, 6, 12]
    """
    if config.elasticity.microbatch_sizes:
        return [0]
    rows, rest = divmod(config.global_batch_size, num_shards)
    return [] if rest else [n for n in range(1, rows + 1) if rows % n == 0]


def given_candidate(config: schema.Config, machine: Machine) -> Candidate | None:
    """The settings as they were given; None if they are not among the candidates."""
    offload = _offload_of(config.zero)
    sizes = {axis: getattr(config.mesh, axis) for axis in axes.OPEN_AXES}
    if offload is None or min(sizes.values()) < 1:
        return None
    try:
        batch = resolve_batch(config, _num_shards(config, machine))
    except ConfigError:
        return None
    elastic = bool(config.elasticity.microbatch_sizes)
    return Candidate(
        0 if elastic else batch.microbatch_size,
        config.zero.stage,
        config.model.remat,
        **sizes,
        offload=offload,
    )


def _offload_of(zero: schema.Zero) -> Offload | None:
    memories = zero.optimizer_memory, zero.parameter_memory
    known: dict[tuple[str, str], Offload] = {
        ("device", "device"): "none",
        ("pinned_host", "device"): "state",
        ("pinned_host", "pinned_host"): "blocks",
    }
    return known.get(memories)


def open_mesh(mesh: schema.Mesh) -> schema.Mesh:
    """A mesh whose axes of one device are to be chosen, unless all sizes are given."""
    sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
    if 0 not in sizes.values() and all(getattr(mesh, x) != -1 for x in axes.AXES):
        return mesh
    opened = {axis: size if size > 1 else 0 for axis, size in sizes.items()}
    return dataclasses.replace(mesh, **opened)


def _num_shards(config: schema.Config, machine: Machine) -> int:
    sizes = meshes.mesh_sizes(config.mesh, machine.num_devices)
    return math.prod(sizes[axis] for axis in axes.BATCH_AXES)
