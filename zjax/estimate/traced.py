"""Costs of a training step of any model, counted in the traced program of the loss."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zjax.jaxprs import residuals
from zjax.jaxprs.flops import Flops
from zjax.jaxprs.sent import Sent, count_sent, sends
from zjax.jaxprs.versions import Closed
from zjax.models.flops import flops_per_row
from zjax.ops import remat
from zjax.settings import schema
from zjax.settings.parameters import is_held_frozen
from zjax.sharding.placement import abstract_key
from zjax.stack.forward import Execution, StackLoss, runs_stack
from zjax.stack.traced import Part, flops_of, trace_parts
from zjax.train.microbatches import cast_batch
from zjax.typing import Batch, Model


def run_flops(model: Model, batch: Batch, config: schema.Config) -> Flops:
    """Counts the FLOPs of a training step of a run per row of a batch.

    Example:
        >>> from zjax.models.build import make_model
        >>> def work(lora):
        ...     config = schema.Config(lora=lora)
        ...     model = make_model(config)
        ...     return run_flops(model, model.inputs, config).products
        >>> round(work(schema.Lora(rank=1)) / work(None), 2)  # frozen matrices
        0.66
    """
    return flops_per_row(model, batch, lambda path: not is_held_frozen(path, config))


class PartBytes(NamedTuple):
    """Bytes of a part of a loss, such as a block."""

    saved: float
    """Residuals from the forward to the backward pass."""
    working: float
    """Values that live while the backward pass runs the part: residuals that are
    recomputed, or results between two products."""
    carry: float
    """Arrays that the part reads from the part before."""


@functools.lru_cache(maxsize=256)
def part_bytes(part: Part, execution: Execution | None = None) -> PartBytes:
    """Counts the bytes of a part; an `execution` runs it as a block."""
    found = _measure(part)
    if execution is None:
        saved = residuals.residual_bytes(found.forward, found.is_free)
        # Logits and their gradient, or cotangents of the largest product.
        programs = found.forward, part.program
        between = max(residuals.transient_bytes(x, found.is_free) for x in programs)
        return PartBytes(saved, 2 * found.recomputed + between, found.carry)
    # Residuals of a block that is recomputed, and about as many cotangents.
    working = 2 * (found.working + found.recomputed)
    policy = execution.policy
    saved = residuals.residual_bytes(
        found.forward,
        found.is_free,
        is_exact=0 < execution.scan_size(part.number) < part.number,
        keeps=None if policy == "none" else remat.keeps(policy),
    )
    # In another memory, a block saves nothing on the device.
    is_here = execution.memory == "device" or policy == "none"
    return PartBytes(saved if is_here else 0.0, working, found.carry)


class _Measured(NamedTuple):
    """What the bytes of a part follow from under any execution."""

    forward: Closed
    is_free: tuple[bool, ...]
    working: float
    recomputed: float
    carry: float


@functools.lru_cache(maxsize=256)
def _measure(part: Part) -> _Measured:
    """Differentiates a part once for all policies."""
    program, number = part.program, len(part.paths)
    others = len(program.jaxpr.invars) - number - part.num_carry
    # Parameters and batch are in memory anyway.
    is_free = (*[True] * number, *[False] * part.num_carry, *[True] * others)
    learned = [True] * (number + part.num_carry) + [False] * others
    forward = residuals.differentiate(program, learned)
    inputs = [x.aval for x in program.jaxpr.invars]
    return _Measured(
        forward,
        is_free,
        residuals.working_bytes(forward, is_free),
        residuals.recomputed_bytes(program),
        residuals.bytes_of(inputs[number:][: part.num_carry]),
    )


def total_sent(parts: Sequence[Part], policy: remat.Policy = "none") -> Sent:
    """Counts the bytes that a device sends in forward and backward pass of a loss.

    The backward pass of a block recomputes what the policy does not save. Gradients of
    the parameters of a stack are not counted: they are reduced as the plan says.
    """
    total = Sent()
    for part in parts:
        trains = len(parts) == 1
        # Only blocks have parts before and after them.
        is_block = part not in (parts[0], parts[-1])
        sent = _part_sent(part, policy if is_block else "none", trains=trains)
        total.update(sent * part.number)
    return total


@functools.lru_cache(maxsize=256)
def _part_sent(part: Part, policy: remat.Policy, *, trains: bool) -> Sent:
    """Counts the bytes that a device sends in a part, by gradients of the carry."""
    if not sends(part.program):
        return Sent()
    number, carry = len(part.paths), part.num_carry
    others = len(part.program.jaxpr.invars) - number - carry
    trained = [trains] * number + [True] * carry + [False] * others
    keeps = None if policy == "none" else remat.keeps(policy)
    return count_sent(residuals.with_gradient(part.program, trained, keeps))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs of a training step on one microbatch, on one device.

    Args:
        params: Number of parameters.
        flops: FLOPs of forward and backward pass, without recomputation.
        saved_bytes: Bytes of residuals from the forward to the backward pass.
        working_bytes: Bytes beside the residuals while the backward pass runs the
            largest block and the head: an estimate from above.
        exchanged: Bytes that a device sends, by mesh axis, in the collectives of
            forward and backward pass that the program of the loss has: inside
            `jax.shard_map`, or between two sharding constraints in a row. A ring of n
            devices sends (n - 1) / n of the full array for an all-gather, a
            reduce-scatter or an all-to-all, and twice as much for an all-reduce.
            Collectives that the compiler chooses, as for gradients and for ZeRO, are
            no part of the program.
    """

    params: int
    flops: Flops
    saved_bytes: float
    working_bytes: float
    exchanged: Mapping[str, float]

    @property
    def activation_bytes(self) -> float:
        """Bytes of activations at the peak, without parameters and gradients."""
        return self.saved_bytes + self.working_bytes


def count(
    model: Model,
    batch: Batch,
    *,
    dtype: Any = None,
    is_trained: Callable[[str], bool] = lambda path: True,
) -> Cost:
    """Counts the costs of a training step, by abstract tracing alone.

    FLOPs are model FLOPs: products of forward and backward pass without recomputation,
    as MFU has them. Bytes follow the policies of `jax.checkpoint` in the program, on
    the assumption that the compiler fuses elementwise operations and reductions.

    Args:
        model: Model as pure functions, such as `zjax.adapt` or `zjax.make_model` makes.
        batch: Arrays or ShapeDtypeStructs of one microbatch of a device, or of the mesh
            in use (`jax.set_mesh`).
        dtype: Floating-point dtype of parameters and inputs, such as `bfloat16`; None
            leaves the dtypes of model and batch.
        is_trained: Function of the path of a parameter: whether it gets a gradient.

    Returns:
        The costs.

    Example:
        >>> import jax.numpy as jnp
        >>> from zjax.typing import Loss
        >>> model = Model(
        ...     init=lambda key: ({"w": jnp.zeros((8, 4))}, {}),
        ...     loss=lambda params, state, x, key: Loss(
        ...         jnp.mean(jnp.tanh(x @ params["w"])), jnp.ones(()), state, {}),
        ...     bind=lambda params, state: None,
        ...     logical=lambda params: {"w": None})
        >>> cost = count(model, jax.ShapeDtypeStruct((16, 8), "float32"))
        >>> cost.params, cost.flops.products, cost.saved_bytes
        (32, 2048.0, 256.0)
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    if dtype is not None:
        shapes = jax.eval_shape(lambda x: cast_batch(x, model, dtype), shapes)
    parts = trace_parts(model, shapes, dtype)
    params, _ = jax.eval_shape(model.init, abstract_key())
    loss, execution = model.loss, None
    if runs_stack(model):
        assert isinstance(loss, StackLoss)
        execution = loss.execution
    inner = parts[1:-1]
    ends = [part_bytes(part) for part in parts if part not in inner]
    blocks = [part_bytes(part, execution) for part in inner]
    numbers = [part.number for part in inner]
    saved = sum(n * x.saved for n, x in zip(numbers, blocks, strict=True))
    working = max((x.working for x in blocks), default=0.0) + ends[-1].working
    policy = execution.policy if execution else "none"
    return Cost(
        params=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        flops=flops_of(parts, is_trained),
        saved_bytes=saved + sum(x.saved for x in ends),
        working_bytes=working,
        exchanged=total_sent(parts, policy),
    )
