"""A function and its derivative as passes that other work may come between.

JAX differentiates in one go. A pipeline does not: what the forward pass leaves waits in
a buffer, and gradients of weights may be made later than those of the stream. Here the
derivative is traced once, and its operations are dealt out to the passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zjax.jaxprs.interpret import Equation, programs_in, walk
from zjax.jaxprs.primitives import CHEAP
from zjax.jaxprs.program import Name, is_in, like, sizes, trace
from zjax.jaxprs.versions import without_dead_code
from zjax.typing import Params


@dataclasses.dataclass(frozen=True)
class Passes:
    """`function(params, stream, rest) -> stream` in passes of its own.

    Args:
        forward: `forward(params, stream, rest) -> (stream, kept)`; what it keeps was
            computed from the stream that entered.
        backward: `backward(params, kept, rest, cotangent) -> (grads, cotangent)`: of
            the parameters, and of the stream that entered. What follows from parameters
            and rest alone is computed again.
    """

    forward: Callable[..., tuple[Any, list[jax.Array]]]
    backward: Callable[..., tuple[Params, Any]]


def differentiate_in_passes(
    function: Callable[[Params, Any, Any], Any], params: Params, stream: Any, rest: Any
) -> Passes:
    """Traces a function and its derivative.

    Args:
        function: Pure; is differentiated by the first two arguments.
        params: Arrays or their shapes, in the form in which the passes will be called.
        stream: The same.
        rest: The same; whatever else it reads.

    Returns:
        Functions of arrays of these shapes.

    Example:
        >>> x = jnp.float32(3)
        >>> passes = differentiate_in_passes(lambda w, x, _: w * x * x, x, x, ())
        >>> y, kept = passes.forward(x, 2 * x, ())
        >>> [float(g) for g in passes.backward(x, kept, (), jnp.float32(1))]
        [36.0, 36.0]
    """
    pulls: list[Any] = []

    def run(params: Params, stream: Any, rest: Any) -> Any:
        out, pull = jax.vjp(lambda p, x: function(p, x, rest), params, stream)
        leaves, tree = jax.tree.flatten(pull)
        pulls[:] = [tree]
        return out, leaves

    program, (out, _) = trace(run, params, stream, rest)
    num_outs, num_params, num_stream = sizes(out, params, stream)
    inputs, outputs = program.inputs, program.outputs
    of_params, of_rest = inputs[:num_params], inputs[num_params + num_stream :]
    outs, left = outputs[:num_outs], outputs[num_outs:]
    reached = program.reached(inputs[num_params:][:num_stream])
    # What has no elements, as masks that a kernel is not given, need not wait.
    empty = {x for x in left if not x.aval.size}
    waiting = list(dict.fromkeys(x for x in left if is_in(x, reached - empty)))
    again = [x for x in left if not is_in(x, reached | empty)]

    def forward(params: Params, stream: Any, rest: Any) -> tuple[Any, list[jax.Array]]:
        known = _by_name(inputs, params, stream, rest)
        values = program.compute([*outs, *waiting], known)
        return like(out, values[:num_outs]), values[num_outs:]

    def backward(
        params: Params, kept: list[jax.Array], rest: Any, cotangent: Any
    ) -> tuple[Params, Any]:
        known = _by_name([*of_params, *of_rest], params, rest)
        found = iter(program.compute(again, known))
        by_name = {x: jnp.zeros_like(x.aval) for x in empty}
        by_name |= dict(zip(waiting, kept, strict=True))
        named = {*by_name}
        leaves = [by_name[x] if is_in(x, named) else next(found) for x in left]
        return jax.tree.unflatten(pulls[0], leaves)(cotangent)

    return Passes(forward, backward)


def without_params(
    function: Callable[..., Any], params: Params, *inputs: Any
) -> Callable[..., Any] | None:
    """What is left of a function whose parameters its results do not depend on.

    Args:
        function: `function(params, *inputs)`, pure.
        params: Arrays or their shapes.
        inputs: The same.

    Returns:
        A function of the inputs, which computes nothing that the results do not need;
        None where they depend on parameters.

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
class Halves:
    """A backward pass, and what is left of it once the stream has its cotangent.

    Args:
        of_stream: `of_stream(params, kept, rest, cotangent) -> (cotangent, handed)`.
        of_params: `of_params(params, kept, rest, handed) -> grads`.
    """

    of_stream: Callable[..., tuple[Any, list[jax.Array]]]
    of_params: Callable[..., Params]


def split_backward(
    backward: Callable[..., tuple[Params, Any]],
    params: Params,
    kept: list[Any],
    rest: Any,
    cotangent: Any,
) -> Halves:
    """Leaves the gradients of parameters to a pass of their own.

    Args:
        backward: As `differentiate_in_passes` gives it.
        params: Arrays or their shapes.
        kept: The same.
        rest: The same.
        cotangent: The same.

    Returns:
        Functions that together compute what `backward` does. The second has what takes
        products or kernels of gradients of parameters alone, and what follows from it;
        it is handed the operands, unless they follow cheaply from `kept`.

    Reference:
        Zero Bubble Pipeline Parallelism (arXiv:2401.10241, section 2).
    """
    program, (grads, stream) = trace(backward, params, kept, rest, cotangent)
    (num_grads,) = sizes(grads)
    num_again = sum(sizes(params, kept, rest))
    of_grads, of_stream = program.outputs[:num_grads], program.outputs[num_grads:]
    again, cotangents = program.inputs[:num_again], program.inputs[num_again:]
    first = set(program.needed(of_stream))
    later = [number for number in program.needed(of_grads) if number not in first]
    dear = {n for n, each in enumerate(program.equations) if not _is_cheap(each)}
    late = program.reached(program.made(dear.intersection(later)))
    far = program.reached(program.made(dear).union(cotangents))
    read = [
        x
        for number in later
        if late.intersection(program.equations[number].outvars)
        for x in program.equations[number].invars
    ]
    between = far - late
    handed = list(dict.fromkeys(x for x in [*read, *of_grads] if is_in(x, between)))

    def stream_first(*args: Any) -> tuple[Any, list[jax.Array]]:
        known = _by_name(program.inputs, *args)
        values = program.compute([*of_stream, *handed], known)
        return like(stream, values[: len(of_stream)]), values[len(of_stream) :]

    def params_later(*args: Any) -> Params:
        known = _by_name([*again, *handed], *args)
        return like(grads, program.compute(of_grads, known))

    return Halves(stream_first, params_later)


def _by_name(names: list[Name], *trees: Any) -> dict[Name, Any]:
    return dict(zip(names, jax.tree.leaves(trees), strict=True))


def _is_cheap(equation: Equation) -> bool:
    inside = [each for program in programs_in(equation) for each in walk(program)]
    kinds = [each.primitive.name for each in inside if not programs_in(each)]
    return CHEAP.issuperset(kinds if inside else [equation.primitive.name])
