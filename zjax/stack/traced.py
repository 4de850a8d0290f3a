"""The loss of a model as traced programs, to be counted before anything runs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from zjax.jaxprs.flops import Flops, count_flops
from zjax.jaxprs.program import map_axes
from zjax.jaxprs.versions import Closed, dtype_promotion
from zjax.sharding.mesh import BATCH_AXES, EXPERT, trace
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.stack.dropping import BlockInput, block_on_tokens
from zjax.stack.forward import runs_stack
from zjax.typing import Batch, Model, Segment
from zjax_kernels.abstract import abstract_kernels


@dataclasses.dataclass(frozen=True)
class Part:
    """A traced part of a loss: the loss itself, or embedding, block or head.

    Args:
        program: Jaxpr whose inputs are the parameters, the carry and all else, and
            whose outputs are the carry, then losses.
        paths: Path of each parameter in the model.
        num_carry: Arrays of the carry that the part reads.
        number: Equal parts that run one after another.
    """

    program: Closed
    paths: tuple[str, ...]
    num_carry: int = 0
    number: int = 1


def trace_parts(
    model: Model, batch: Batch, dtype: Any = None, mesh: AbstractMesh | None = None
) -> list[Part]:
    """Traces the loss of a model on shapes: one part, or the parts of a stack.

    Equal blocks are traced once.

    Args:
        model: Model as pure functions.
        batch: Shapes of a microbatch; of one device if there is a `mesh`.
        dtype: Floating-point dtype of the parameters; None for the initial dtypes.
        mesh: Mesh whose batch axes the program maps, as a device that has part of the
            experts; None for a program of one device.
    """
    with abstract_kernels(), dtype_promotion():
        params, state = jax.eval_shape(model.init, abstract_key())
        paths = jax.tree_util.tree_map_with_path(lambda keys, _: path_of(keys), params)
        logical = model.logical(params)
        params = jax.tree.map(lambda x: _cast(x, dtype), params)
        if mesh is not None:
            share = functools.partial(_share_of_experts, mesh.shape[EXPERT])
            params = jax.tree.map(share, params, logical)
        return on_devices(mesh, lambda: _trace(model, params, state, paths, batch))


def _trace(
    model: Model, params: Any, state: Any, paths: Any, batch: Batch
) -> list[Part]:
    """Traces the loss, or the parts of the stack."""
    if runs_stack(model):
        return _trace_stack(model, params, paths, batch)
    key, loss = abstract_key(), lambda *inputs: model.loss(*inputs).value
    program = trace(loss, params, state, batch, key)
    return [Part(program, tuple(jax.tree.leaves(paths)))]


T = TypeVar("T")


def on_devices(mesh: AbstractMesh | None, trace: Callable[[], T]) -> T:
    """Calls a function that traces the program of one device.

    A mesh maps the batch axes, as `shard_map` of a step does; None has one device.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 4, 1), BATCH_AXES)
        >>> on_devices(mesh, lambda: jax.lax.axis_size(EXPERT))
        1
    """
    return trace() if mesh is None else map_axes(mesh, BATCH_AXES, trace)


def _cast(x: Any, dtype: Any) -> Any:
    floats = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return _shape(x.shape, dtype) if floats else x


def _share_of_experts(shares: int, x: Any, names: Any) -> Any:
    """Cuts the dim of experts to the experts of one device."""
    dims = zip(x.shape, names or [None] * len(x.shape), strict=True)
    return _shape([n // shares if d == "experts" else n for n, d in dims], x.dtype)


def _trace_stack(model: Model, params: Any, paths: Any, batch: Batch) -> list[Part]:
    """Traces embedding, one block of each segment, and head."""
    stack, key = model.stack, abstract_key()
    assert stack is not None
    embed, segments, head = stack.split(params)
    embed_paths, segment_paths, head_paths = stack.split(paths)

    def part(function: Callable[..., Any], params: Any, *others: Any) -> Closed:
        return trace(function, params, *others)

    def run_block(segment: Segment) -> Callable[..., Any]:
        block = block_on_tokens(stack, segment)

        def run(*inputs: Any) -> Any:
            *others, key = inputs
            carry, auxiliary = block(*others, BlockInput(key, number=0))
            return carry, auxiliary.loss

        return run

    carry, context = jax.eval_shape(stack.embed, embed, batch, key)
    program = part(lambda *inputs: stack.embed(*inputs)[0], embed, batch, key)
    parts = [Part(program, _leaves(embed_paths))]
    num_carry = len(jax.tree.leaves(carry))
    for segment, stacked, names in zip(
        stack.segments, segments, segment_paths, strict=True
    ):
        layer = jax.tree.map(lambda x: _shape(x.shape[1:], x.dtype), stacked)
        program = part(run_block(segment), layer, carry, context, key)
        parts.append(Part(program, _leaves(names), num_carry, segment.num_blocks))
    program = part(lambda *inputs: stack.head(*inputs)[0], head, carry, batch)
    return [*parts, Part(program, _leaves(head_paths), num_carry)]


_shape = jax.ShapeDtypeStruct


def _leaves(tree: Any) -> tuple[str, ...]:
    return tuple(jax.tree.leaves(tree))


def flops_of(
    parts: Sequence[Part], is_trained: Callable[[str], bool] = lambda path: True
) -> Flops:
    """Counts the FLOPs of forward and backward pass, as `count_flops`.

    `is_trained(path)` says which parameters get a gradient.
    """
    total, carry = Flops(), list[bool]()
    for part in parts:
        trained = [is_trained(path) for path in part.paths]
        others = len(part.program.jaxpr.invars) - len(trained) - part.num_carry
        rest = [False] * others
        number = part.number
        while number:
            # Blocks may read a carry that depends on no trained parameter yet.
            given = carry[: part.num_carry]
            found, outputs = count_flops(part.program, [*trained, *given, *rest])
            # All blocks that read an equal carry cost the same.
            times = number if outputs[: part.num_carry] == given else 1
            total, number, carry = total + found * times, number - times, outputs
    return total
