"""Bytes of activations that a device stores or sends, counted in traced blocks."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from zjax.estimate.traced import PartBytes, part_bytes, total_sent
from zjax.jaxprs.sent import Sent
from zjax.models.build import make_model
from zjax.ops import remat
from zjax.settings import schema
from zjax.settings.batch import BatchSizes
from zjax.settings.layers import layers_per_scan
from zjax.settings.sequence import sequence_method
from zjax.sharding.mesh import EXPERT, PIPELINE, SEQUENCE, TENSOR, abstract_mesh
from zjax.stack.forward import Execution
from zjax.stack.traced import Part, on_devices, trace_parts
from zjax.train.programs import make_pipeline_schedule
from zjax.typing import Model


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a trace of blocks depends on; `model` follows from `config`."""

    config: schema.Config
    rows: int
    length: int
    mesh: AbstractMesh | None
    model: Model = dataclasses.field(compare=False)


def activation_bytes(
    config: schema.Config, sizes: Mapping[str, int], batch: BatchSizes, model: Model
) -> float:
    """Bytes of activations on the fullest device during the backward pass.

    State and gradients are not included. `model` is the model of the config, whatever
    `model.remat`.

    Example:
        >>> from zjax.settings.axes import axis_sizes
        >>> config = schema.Config(model=schema.Model(remat="full", vocab_size=50_257))
        >>> sizes, model = axis_sizes(config, 1), make_model(config)
        >>> [round(activation_bytes(config, sizes, BatchSizes(n, 1, n), model) / 1e6)
        ...  for n in (1, 2, 3)]
        [536, 917, 1298]
    """
    settings, rows = config.model, batch.microbatch_size
    is_ring = _is_ring(config, sizes)
    local = -(-config.data.length // sizes[SEQUENCE])
    mesh, length, shares = None, config.data.length, sizes[SEQUENCE] * sizes[TENSOR]
    if settings.moe and sizes[EXPERT] * shares > 1:
        # Routers compare the tokens of a device.
        given = schema.Mesh(data=1, expert=sizes[EXPERT], tensor=sizes[TENSOR])
        mesh = abstract_mesh(given, sizes[EXPERT] * sizes[TENSOR])
        length, shares = local, sizes[TENSOR]
    shape = _shape_of(config, is_ring)
    model = make_model(shape) if is_ring else model
    embed, *blocks, _ = _trace(_Run(shape, rows, length, mesh, model))
    head = _trace(_Run(shape, rows, local, None, model))[-1]
    memory = remat.within_reach(settings.activation_memory)
    execution = Execution(layers_per_scan(config), settings.remat, memory)

    def measure(part: Part, execution: Execution | None = None) -> PartBytes:
        return on_devices(mesh, lambda: part_bytes(part, execution))

    found = [(part.number, measure(part, execution)) for part in blocks]
    saved = _saved_by_all(config, sizes[PIPELINE], batch, found)
    working = max(each.working for _, each in found)
    first, last = measure(embed), part_bytes(head)
    # The head is split over the stages, too.
    ends = (last.saved + last.working) / (sizes[TENSOR] * sizes[PIPELINE])
    return (first.saved + saved + working) / shares + ends


def sent_bytes(
    config: schema.Config, sizes: Mapping[str, int], num_rows: int, model: Model
) -> Sent:
    """Counts the bytes that a device sends in a microbatch, by mesh axis.

    Counts the collectives of the layers: of tokens with experts, of attention over a
    split sequence, and of tensor-parallel layers. Gradients of parameters, ZeRO, and
    the transfers between pipeline stages are not included.

    Example:
        >>> from zjax.settings.axes import axis_sizes
        >>> config = schema.Config(mesh=schema.Mesh(tensor=2))
        >>> sent = sent_bytes(config, axis_sizes(config, 2), 1, make_model(config))
        >>> stream = 2 * config.data.length * config.model.embed_size
        >>> sent["tensor"] / (stream / 2)  # 8 per layer, and 1 of the embedding
        97.0
    """
    expert, sequence, tensor = (sizes[axis] for axis in (EXPERT, SEQUENCE, TENSOR))
    if expert == sequence == tensor == 1:
        return Sent()
    given = schema.Mesh(data=1, expert=expert, sequence=sequence, tensor=tensor)
    mesh = abstract_mesh(given, expert * sequence * tensor)
    shape = _shape_of(config, is_ring=False)
    parts = _trace(_Run(shape, num_rows, config.data.length, mesh, model))
    total = on_devices(mesh, lambda: total_sent(parts, config.model.remat))
    return total * (1 / sizes[PIPELINE])


def _is_ring(config: schema.Config, sizes: Mapping[str, int]) -> bool:
    """Whether a ring of devices computes dense attention, and holds no scores."""
    if sizes[SEQUENCE] == 1 or isinstance(config.model.attention, schema.Sparse):
        return False
    axes = {axis: sizes[axis] for axis in (SEQUENCE, TENSOR)}
    return sequence_method(config.model, **axes) == "ring"


def _shape_of(config: schema.Config, is_ring: bool) -> schema.Config:
    """Keeps the settings that blocks depend on, for one trace of runs that share them.

    Policies of `model.remat` are applied to the trace.
    """
    model = dataclasses.replace(
        config.model,
        remat="none",
        activation_memory="device",
        attention=schema.Cudnn() if is_ring else config.model.attention,
    )
    kept = ("lora", "quantize", "precision", "deterministic", "data")
    settings = {name: getattr(config, name) for name in kept}
    return dataclasses.replace(schema.Config(), model=model, **settings)


@functools.lru_cache(maxsize=64)
def _trace(run: _Run) -> list[Part]:
    """Traces the parts of a built-in model on rows of tokens."""
    dtype = jnp.dtype(run.config.precision.compute_dtype)
    tokens = jax.ShapeDtypeStruct((run.rows, run.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return trace_parts(run.model, batch, dtype, run.mesh)


def _saved_by_all(
    config: schema.Config,
    num_stages: int,
    batch: BatchSizes,
    blocks: Sequence[tuple[int, PartBytes]],
) -> float:
    """Residuals of the blocks and microbatches that a stage holds."""
    saved = sum(number * each.saved for number, each in blocks)
    if num_stages == 1:
        return saved
    given = config.pipeline
    schedule = make_pipeline_schedule(given, num_stages, batch.num_microbatches)
    num_chunks, num_layers = num_stages * schedule.num_chunks, config.model.num_layers
    chunk = -(-num_layers // num_chunks) * saved / num_layers
    if not given.recomputes:
        return schedule.num_slots * chunk
    # With recompute, a slot holds only the input of a chunk, and one chunk is
    # recomputed at a time.
    return schedule.num_slots * blocks[0][1].carry + chunk
