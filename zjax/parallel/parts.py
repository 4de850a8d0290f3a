"""A function and its derivative as passes that other work may come between.

JAX differentiates in one go. A pipeline does not: what the forward pass leaves waits in
a buffer, and gradients of weights may be made later than those of the stream. Here the
derivative is traced once, and its operations are dealt out to the passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from zjax.parallel.remat import CHEAP
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

    graph, (out, _) = _trace(run, params, stream, rest)
    num_outs, num_params, num_stream = _sizes(out, params, stream)
    of_params, entering = graph.ins[:num_params], graph.ins[num_params:][:num_stream]
    of_rest = graph.ins[num_params + num_stream :]
    outs, left = graph.outs[:num_outs], graph.outs[num_outs:]
    reached = graph.reached(entering)
    # What has no elements, as masks that a kernel is not given, need not wait.
    empty = {x for x in left if not x.aval.size}
    waiting = list(dict.fromkeys(x for x in left if _is_in(x, reached - empty)))
    again = [x for x in left if not _is_in(x, reached | empty)]

    def forward(params: Params, stream: Any, rest: Any) -> tuple[Any, list[jax.Array]]:
        values = graph.run(graph.ins, [*outs, *waiting], (params, stream, rest))
        return _like(out, values[:num_outs]), values[num_outs:]

    def backward(
        params: Params, kept: list[jax.Array], rest: Any, cotangent: Any
    ) -> tuple[Params, Any]:
        found = iter(graph.run([*of_params, *of_rest], again, (params, rest)))
        by_name = {x: jnp.zeros_like(x.aval) for x in empty}
        by_name |= dict(zip(waiting, kept, strict=True))
        named = {*by_name}
        leaves = [by_name[x] if _is_in(x, named) else next(found) for x in left]
        return jax.tree.unflatten(pulls[0], leaves)(cotangent)

    return Passes(forward, backward)


def follows_from_params(
    function: Callable[..., Any], params: Params, *inputs: Any
) -> list[bool]:
    """Which results of a function depend on its parameters.

    Args:
        function: `function(params, *inputs)`, pure.
        params: Arrays or their shapes.
        inputs: The same.

    Returns:
        One answer per array of the result.

    Example:
        >>> follows_from_params(lambda w, x: (w * x, x + 1), jnp.ones(2), jnp.ones(2))
        [True, False]
    """
    graph, _ = _trace(function, params, *inputs)
    reached = graph.reached(graph.ins[: len(jax.tree.leaves(params))])
    return [_is_in(x, reached) for x in graph.outs]


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
    graph, (grads, stream) = _trace(backward, params, kept, rest, cotangent)
    (num_grads,) = _sizes(grads)
    num_again = sum(_sizes(params, kept, rest))
    of_grads, of_stream = graph.outs[:num_grads], graph.outs[num_grads:]
    again, cotangents = graph.ins[:num_again], graph.ins[num_again:]
    first = set(graph.needed(of_stream))
    later = [number for number in graph.needed(of_grads) if number not in first]
    dear = {n for n, each in enumerate(graph.equations) if not _is_cheap(each)}
    late = graph.reached(graph.made(dear.intersection(later)))
    far = graph.reached(graph.made(dear).union(cotangents))
    read = [
        x
        for number in later
        if late.intersection(graph.equations[number].outvars)
        for x in graph.equations[number].invars
    ]
    between = far - late
    handed = list(dict.fromkeys(x for x in [*read, *of_grads] if _is_in(x, between)))

    def stream_first(*args: Any) -> tuple[Any, list[jax.Array]]:
        values = graph.run(graph.ins, [*of_stream, *handed], args)
        return _like(stream, values[: len(of_stream)]), values[len(of_stream) :]

    def params_later(*args: Any) -> Params:
        return _like(grads, graph.run([*again, *handed], of_grads, args))

    return Halves(stream_first, params_later)


@dataclasses.dataclass(frozen=True)
class _Graph:
    """Operations on named values."""

    closed: Any

    @property
    def ins(self) -> list[Any]:
        return list(self.closed.jaxpr.invars)

    @property
    def outs(self) -> list[Any]:
        return list(self.closed.jaxpr.outvars)

    @property
    def equations(self) -> list[Any]:
        return self.closed.jaxpr.eqns

    def made(self, numbers: Iterable[int]) -> set[Any]:
        """What operations return."""
        return {x for number in numbers for x in self.equations[number].outvars}

    def reached(self, names: Iterable[Any]) -> set[Any]:
        """What is computed from any of these."""
        found = set(names)
        for equation in self.equations:
            if any(_is_in(x, found) for x in equation.invars):
                found.update(equation.outvars)
        return found

    def needed(self, names: Sequence[Any], given: Sequence[Any] = ()) -> list[int]:
        """Numbers of the operations that compute these from what is given."""
        wanted, found = {x for x in names if isinstance(x, jex.Var)}, []
        wanted -= set(given)
        for number in reversed(range(len(self.equations))):
            equation = self.equations[number]
            if wanted.intersection(equation.outvars):
                found.append(number)
                wanted.update(x for x in equation.invars if isinstance(x, jex.Var))
                wanted -= set(given)
        return found[::-1]

    def run(self, ins: Sequence[Any], outs: Sequence[Any], args: Any) -> list[Any]:
        """Computes some values from others, and nothing else."""
        numbers = self.needed(outs, ins)
        part = self.closed.jaxpr.replace(
            invars=list(ins),
            outvars=list(outs),
            eqns=[self.equations[number] for number in numbers],
        )
        function = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, self.closed.consts))
        return list(function(*jax.tree.leaves(args)))


def _trace(function: Callable[..., Any], *args: Any) -> tuple[_Graph, Any]:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    # Functions called by name hide what does not follow from all of their arguments.
    run = functools.partial(_run_inlined, closed)
    inlined = jax.make_jaxpr(run)(*(x.aval for x in closed.jaxpr.invars))
    return _Graph(inlined), shapes


def _run_inlined(closed: Any, *args: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def value(x: Any) -> Any:
        return values[x] if isinstance(x, jex.Var) else x.val

    for equation in jaxpr.eqns:
        inputs = [value(x) for x in equation.invars]
        operation = equation.primitive
        if operation.name in ("jit", "pjit"):
            results = _run_inlined(equation.params["jaxpr"], *inputs)
        else:
            settings = operation.get_bind_params(equation.params)
            results = operation.bind(*inputs, **settings)
            results = results if operation.multiple_results else [results]
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _is_cheap(equation: Any) -> bool:
    inner = [x for x in jax.tree.leaves(equation.params) if _is_jaxpr(x)]
    if inner:
        return all(_is_cheap(each) for x in inner for each in x.eqns)
    return equation.primitive.name in CHEAP


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def _sizes(*trees: Any) -> list[int]:
    return [len(jax.tree.leaves(tree)) for tree in trees]


def _like(tree: Any, leaves: list[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_in(x: Any, names: set[Any]) -> bool:
    # Constants are written in place and have no name.
    return isinstance(x, jex.Var) and x in names
