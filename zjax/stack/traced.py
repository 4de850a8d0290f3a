"""The loss of a model as traced programs, to be counted before anything runs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zjax.jaxprs.flops import Flops, count_flops
from zjax.jaxprs.versions import Closed, dtype_promotion
from zjax.sharding.mesh import trace
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.stack.forward import runs_stack
from zjax.typing import Batch, Model
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


def trace_parts(model: Model, batch: Batch, cast: Any = lambda x: x) -> list[Part]:
    """Traces the loss of a model on shapes: one part, or the parts of its stack.

    Equal blocks are traced once. `cast` maps the shapes of parameters to the shapes
    that the loss gets.
    """
    with abstract_kernels(), dtype_promotion():
        params, state = jax.eval_shape(model.init, abstract_key())
        paths = jax.tree_util.tree_map_with_path(lambda keys, _: path_of(keys), params)
        params = jax.tree.map(cast, params)
        if runs_stack(model):
            return _trace_stack(model, params, paths, batch)
        key, loss = abstract_key(), lambda *inputs: model.loss(*inputs).value
        program = trace(loss, params, state, batch, key)
        return [Part(program, tuple(jax.tree.leaves(paths)))]


def _trace_stack(model: Model, params: Any, paths: Any, batch: Batch) -> list[Part]:
    """Traces embedding, one block of each segment, and head."""
    stack, key = model.stack, abstract_key()
    assert stack is not None
    embed, segments, head = stack.split(params)
    embed_paths, segment_paths, head_paths = stack.split(paths)

    def part(function: Callable[..., Any], params: Any, *others: Any) -> Closed:
        return trace(function, params, *others)

    def run_block(block: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            carry, auxiliary = block(*inputs)
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
        program = part(run_block(segment.block), layer, carry, context, key)
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
