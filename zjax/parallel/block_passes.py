"""Forward and backward pass of some blocks as separate functions.

A pipeline runs other passes between the two: residuals wait in a buffer, and gradients
of weights may be computed later than those of the stream. The derivative is traced
once, and its operations are distributed over the passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zjax.jaxprs.interpret import Equation, programs_in, walk
from zjax.jaxprs.primitives import CHEAP
from zjax.jaxprs.program import Name, Program, is_in, like, sizes, trace
from zjax.jaxprs.versions import without_dead_code
from zjax.typing import Params


@dataclasses.dataclass(frozen=True)
class BlockPasses:
    """The passes of `function(params, stream, nondiff) -> stream`.

    Args:
        forward: `forward(params, stream, nondiff) -> (stream, residuals)`; residuals
            are only what depends on the stream that entered.
        backward: `backward(params, residuals, nondiff, cotangent) -> (grads,
            cotangent)`: of the parameters, and of the stream that entered. Recomputes
            what depends on `params` and `nondiff` alone.
    """

    forward: Callable[..., tuple[Any, list[jax.Array]]]
    backward: Callable[..., tuple[Params, Any]]


def differentiate_in_passes(
    function: Callable[[Params, Any, Any], Any],
    params: Params,
    stream: Any,
    nondiff: Any,
) -> BlockPasses:
    """Traces a function and its derivative.

    Args:
        function: Pure; is differentiated by its first two arguments.
        params: Arrays or their shapes, as the passes will be called with.
        stream: The same.
        nondiff: The same; all else that the function reads.

    Returns:
        Functions of arrays of these shapes.

    Example:
        >>> x = jnp.float32(3)
        >>> passes = differentiate_in_passes(lambda w, x, _: w * x * x, x, x, ())
        >>> y, residuals = passes.forward(x, 2 * x, ())
        >>> [float(g) for g in passes.backward(x, residuals, (), jnp.float32(1))]
        [36.0, 36.0]
    """
    program, out, pull = _trace_vjp(function, params, stream, nondiff)
    num_outs, num_params, num_stream = sizes(out, params, stream)
    inputs, outputs = program.inputs, program.outputs
    of_params, of_nondiff = inputs[:num_params], inputs[num_params + num_stream :]
    outs, saved = outputs[:num_outs], outputs[num_outs:]
    reached = program.reached(inputs[num_params:][:num_stream])
    # Arrays without elements, such as masks that a kernel is not given, are made anew.
    empty = {x for x in saved if not x.aval.size}
    residual_names = list(dict.fromkeys(x for x in saved if is_in(x, reached - empty)))
    recomputed = [x for x in saved if not is_in(x, reached | empty)]

    def forward(
        params: Params, stream: Any, nondiff: Any
    ) -> tuple[Any, list[jax.Array]]:
        known = _by_name(inputs, params, stream, nondiff)
        values = program.compute([*outs, *residual_names], known)
        return like(out, values[:num_outs]), values[num_outs:]

    def backward(
        params: Params, residuals: list[jax.Array], nondiff: Any, cotangent: Any
    ) -> tuple[Params, Any]:
        known = _by_name([*of_params, *of_nondiff], params, nondiff)
        found = iter(program.compute(recomputed, known))
        by_name = {x: jnp.zeros_like(x.aval) for x in empty}
        by_name |= dict(zip(residual_names, residuals, strict=True))
        named = {*by_name}
        leaves = [by_name[x] if is_in(x, named) else next(found) for x in saved]
        return jax.tree.unflatten(pull, leaves)(cotangent)

    return BlockPasses(forward, backward)


def _trace_vjp(
    function: Callable[..., Any], params: Params, stream: Any, nondiff: Any
) -> tuple[Program, Any, Any]:
    """A program of outputs and residuals; the output shapes; the tree of the vjp."""
    pulls: list[Any] = []

    def run(params: Params, stream: Any, nondiff: Any) -> Any:
        out, pull = jax.vjp(lambda p, x: function(p, x, nondiff), params, stream)
        leaves, tree = jax.tree.flatten(pull)
        pulls[:] = [tree]
        return out, leaves

    program, (out, _) = trace(run, params, stream, nondiff)
    return program, out, pulls[0]


def without_params(
    function: Callable[..., Any], params: Params, *inputs: Any
) -> Callable[..., Any] | None:
    """Drops the parameters of a function whose results do not depend on them.

    Args:
        function: `function(params, *inputs)`, pure.
        params: Arrays or their shapes.
        inputs: The same.

    Returns:
        A function of the inputs without dead code; None where the results depend on
        the parameters.

    Example:
        >>> x = jnp.ones(2)
        >>> size = without_params(lambda w, x: jnp.sum(0 * x) + (w * x).size, x, x)
        >>> float(size(x))
        2.0
        >>> without_params(lambda w, x: w * x, x, x) is None
        True
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
    num_params, *others = sizes(params, *inputs)
    stay = [False] * num_params + [True] * sum(others)
    program, are_read = without_dead_code(closed, stay)
    if any(are_read[:num_params]):
        return None
    run = core.jaxpr_as_fun(program)
    return lambda *inputs: like(shapes, run(*jax.tree.leaves(inputs)))


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """A backward pass as two: input gradient first, weight gradient later.

    Args:
        stream: `stream(params, residuals, nondiff, cotangent) -> (cotangent, operands)`
        params: `params(params, residuals, nondiff, operands) -> grads`.
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

    Args:
        backward: From `differentiate_in_passes`.
        params: Arrays or their shapes.
        residuals: The same.
        nondiff: The same.
        cotangent: The same.

    Returns:
        Functions that together compute what `backward` does. The later one computes
        the products and kernels that only gradients of parameters need, and what
        depends on these; it gets their operands, unless these follow from `residuals`
        by cheap operations.

    Reference:
        Zero Bubble Pipeline Parallelism (arXiv:2401.10241, section 2).
    """
    program, (grads, stream) = trace(backward, params, residuals, nondiff, cotangent)
    (num_grads,) = sizes(grads)
    num_common = sum(sizes(params, residuals, nondiff))
    of_grads, of_stream = program.outputs[:num_grads], program.outputs[num_grads:]
    common, cotangents = program.inputs[:num_common], program.inputs[num_common:]
    first = set(program.needed(of_stream))
    later = [number for number in program.needed(of_grads) if number not in first]
    expensive = {n for n, each in enumerate(program.equations) if not _is_cheap(each)}
    late = program.reached(program.made(expensive.intersection(later)))
    far = program.reached(program.made(expensive).union(cotangents))
    read = [
        x
        for number in later
        if late.intersection(program.equations[number].outvars)
        for x in program.equations[number].invars
    ]
    between = far - late
    operands = list(dict.fromkeys(x for x in [*read, *of_grads] if is_in(x, between)))

    def stream_first(*args: Any) -> tuple[Any, list[jax.Array]]:
        known = _by_name(program.inputs, *args)
        values = program.compute([*of_stream, *operands], known)
        return like(stream, values[: len(of_stream)]), values[len(of_stream) :]

    def params_later(*args: Any) -> Params:
        known = _by_name([*common, *operands], *args)
        return like(grads, program.compute(of_grads, known))

    return SplitBackward(stream_first, params_later)


def _by_name(names: list[Name], *trees: Any) -> dict[Name, Any]:
    return dict(zip(names, jax.tree.leaves(trees), strict=True))


def _is_cheap(equation: Equation) -> bool:
    inside = [each for program in programs_in(equation) for each in walk(program)]
    kinds = [each.primitive.name for each in inside if not programs_in(each)]
    return CHEAP.issuperset(kinds if inside else [equation.primitive.name])
