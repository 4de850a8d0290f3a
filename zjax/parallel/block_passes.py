"""Forward and backward pass of some blocks as separate functions.

A pipeline runs other passes between the two: residuals wait in a buffer, and gradients
of weights may be computed later than gradients of the stream. The derivative is traced
once; each of the traced operations goes to one or more passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zjax.jaxprs.program import (
    CHEAP,
    Equation,
    Name,
    Program,
    is_in,
    like,
    programs_in,
    sizes,
    trace,
    walk,
)
from zjax.jaxprs.versions import without_dead_code
from zjax.typing import Params


@dataclasses.dataclass(frozen=True)
class BlockPasses:
    """Passes of `function(params, stream, nondiff) -> stream`.

    Args:
        forward: `forward(params, stream, nondiff) -> (stream, residuals)`; residuals
            are the saved values that depend on the input stream.
        backward: `backward(params, residuals, nondiff, cotangent) -> (grads,
            cotangent)`: gradients of the parameters, cotangent of the input stream.
            Recomputes the values that depend on `params` and `nondiff` alone.
    """

    forward: Callable[..., tuple[Any, list[jax.Array]]]
    backward: Callable[..., tuple[Params, Any]]


def differentiate_in_passes(
    function: Callable[[Params, Any, Any], Any],
    params: Params,
    stream: Any,
    nondiff: Any,
) -> BlockPasses:
    """Traces a function and the derivative by `params` and `stream`."""
    program, out, pull = _trace_vjp(function, params, stream, nondiff)
    num_outs, num_params, num_stream = sizes(out, params, stream)
    inputs, outputs = program.inputs, program.outputs
    stream_end = num_params + num_stream
    without_stream = inputs[:num_params] + inputs[stream_end:]
    outs, saved = outputs[:num_outs], outputs[num_outs:]
    from_stream = program.reached(inputs[num_params:stream_end])
    # Backward recreates arrays without elements, such as the absent mask of a kernel:
    # a GPU compiler fails on them in the buffers of a pipeline.
    empty = {x for x in saved if not x.aval.size}
    # A residual that several products read is saved once.
    residual_names = list(
        dict.fromkeys(x for x in saved if is_in(x, from_stream - empty))
    )
    recomputed = [x for x in saved if not is_in(x, from_stream | empty)]

    def forward(
        params: Params, stream: Any, nondiff: Any
    ) -> tuple[Any, list[jax.Array]]:
        known = _by_name(inputs, params, stream, nondiff)
        values = program.compute([*outs, *residual_names], known)
        return like(out, values[:num_outs]), values[num_outs:]

    def backward(
        params: Params, residuals: list[jax.Array], nondiff: Any, cotangent: Any
    ) -> tuple[Params, Any]:
        known = _by_name(without_stream, params, nondiff)
        recomputed_values = iter(program.compute(recomputed, known))
        by_name = {x: jnp.zeros_like(x.aval) for x in empty}
        by_name |= dict(zip(residual_names, residuals, strict=True))
        leaves = [
            by_name[x] if is_in(x, by_name.keys()) else next(recomputed_values)
            for x in saved
        ]
        return jax.tree.unflatten(pull, leaves)(cotangent)

    return BlockPasses(forward, backward)


def _trace_vjp(
    function: Callable[..., Any], params: Params, stream: Any, nondiff: Any
) -> tuple[Program, Any, Any]:
    """Traces outputs and residuals; returns the program, shapes and tree of the vjp."""
    pulls: list[Any] = []

    def run(params: Params, stream: Any, nondiff: Any) -> Any:
        out, pull = jax.vjp(lambda p, x: function(p, x, nondiff), params, stream)
        leaves, tree = jax.tree.flatten(pull)
        # A tree structure is no array: `trace` cannot return it.
        pulls[:] = [tree]
        return out, leaves

    program, (out, _) = trace(run, params, stream, nondiff)
    return program, out, pulls[0]


def without_params(
    function: Callable[..., Any], params: Params, *inputs: Any
) -> Callable[..., Any] | None:
    """Removes the argument `params` of a function; None if a result depends on it."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
    num_params, *nums_inputs = sizes(params, *inputs)
    # Unread inputs stay, as callers pass all of them.
    must_stay = [False] * num_params + [True] * sum(nums_inputs)
    program, are_read = without_dead_code(closed, must_stay)
    if any(are_read[:num_params]):
        return None
    run = core.jaxpr_as_fun(program)
    return lambda *inputs: like(shapes, run(*jax.tree.leaves(inputs)))


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """A backward pass as two functions: input gradient first, weight gradients later.

    Args:
        stream: `stream(params, residuals, nondiff, cotangent) -> (cotangent, operands)`
    """

    stream: Callable[..., tuple[Any, list[jax.Array]]]
    params: Callable[..., Params]


def split_backward(
    backward: Callable[..., tuple[Params, Any]],
    params: Params,
    residuals: list[Any],
    nondiff: Any,
    cotangent: Any,
) -> SplitBackward:
    """Moves the gradients of parameters to a later pass.

    The later pass runs the matmuls and kernels that only gradients of parameters need,
    with the operations behind. The first pass hands over the operands, except operands
    that cheap operations recompute from `residuals`.

    Reference:
        Zero Bubble Pipeline Parallelism (arXiv:2401.10241, section 2).
    """
    program, (grads, stream) = trace(backward, params, residuals, nondiff, cotangent)
    (num_grads,) = sizes(grads)
    num_common = sum(sizes(params, residuals, nondiff))
    grad_outputs, stream_outputs = (
        program.outputs[:num_grads],
        program.outputs[num_grads:],
    )
    common, cotangents = program.inputs[:num_common], program.inputs[num_common:]
    for_stream = set(program.needed(stream_outputs))
    for_grads = [i for i in program.needed(grad_outputs) if i not in for_stream]
    expensive = {i for i, each in enumerate(program.equations) if not _is_cheap(each)}
    delayed = program.reached(program.made(expensive.intersection(for_grads)))
    costly = program.reached(program.made(expensive).union(cotangents))
    read_later = [
        x
        for i in for_grads
        if delayed.intersection(program.equations[i].outvars)
        for x in program.equations[i].invars
    ]
    # Values of cheap operations on residuals are recomputed, not stored.
    passed_on = costly - delayed
    operands = list(
        dict.fromkeys(x for x in [*read_later, *grad_outputs] if is_in(x, passed_on))
    )

    def stream_first(*args: Any) -> tuple[Any, list[jax.Array]]:
        known = _by_name(program.inputs, *args)
        values = program.compute([*stream_outputs, *operands], known)
        num_outs = len(stream_outputs)
        return like(stream, values[:num_outs]), values[num_outs:]

    def params_later(*args: Any) -> Params:
        known = _by_name([*common, *operands], *args)
        return like(grads, program.compute(grad_outputs, known))

    return SplitBackward(stream_first, params_later)


def _by_name(names: list[Name], *trees: Any) -> dict[Name, Any]:
    """Maps names to the leaves of trees."""
    return dict(zip(names, jax.tree.leaves(trees), strict=True))


def _is_cheap(equation: Equation) -> bool:
    """Whether an equation, with all programs inside it, runs cheap primitives alone."""
    inside = [each for program in programs_in(equation) for each in walk(program)]
    kinds = [each.primitive.name for each in inside if not programs_in(each)]
    return CHEAP.issuperset(kinds if inside else [equation.primitive.name])
