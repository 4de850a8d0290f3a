"""The operations of a function by name, to be run in parts or in another order."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
from jax.extend import core as jex


@dataclasses.dataclass(frozen=True)
class Graph:
    """Operations on named values.

    Args:
        closed: The traced function, in which nothing is called by name.
    """

    closed: Any

    @property
    def ins(self) -> list[Any]:
        """Names of the inputs."""
        return list(self.closed.jaxpr.invars)

    @property
    def outs(self) -> list[Any]:
        """Names of the results; a constant is written in place and has none."""
        return list(self.closed.jaxpr.outvars)

    @property
    def equations(self) -> list[Any]:
        """The operations in their order."""
        return self.closed.jaxpr.eqns

    def made(self, numbers: Iterable[int]) -> set[Any]:
        """What operations return."""
        return {x for number in numbers for x in self.equations[number].outvars}

    def reached(self, names: Iterable[Any]) -> set[Any]:
        """What is computed from any of these."""
        found = set(names)
        for equation in self.equations:
            if any(is_in(x, found) for x in equation.invars):
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


def trace(function: Callable[..., Any], *args: Any) -> tuple[Graph, Any]:
    """Finds the operations of a function.

    Args:
        function: Pure.
        args: Trees of arrays or of their shapes.

    Returns:
        The operations, those of functions called by name and of blocks that are
        recomputed among the others; and the shapes of the results.

    Example:
        >>> graph, _ = trace(jax.jit(lambda x: 2 * x + 1), jax.numpy.ones(3))
        >>> [str(each.primitive) for each in graph.equations]
        ['mul', 'add']
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    # Functions called by name hide what does not follow from all of their arguments.
    run = functools.partial(_run_inlined, closed)
    inlined = jax.make_jaxpr(run)(*(x.aval for x in closed.jaxpr.invars))
    return Graph(inlined), shapes


def sizes(*trees: Any) -> list[int]:
    """How many arrays each tree has."""
    return [len(jax.tree.leaves(tree)) for tree in trees]


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """The tree with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def is_in(x: Any, names: Set[Any]) -> bool:
    """Whether a value has one of these names."""
    return isinstance(x, jex.Var) and x in names


def apply(equation: Any, *inputs: Any) -> list[Any]:
    """Does one operation."""
    settings = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*inputs, **settings)
    return list(results) if equation.primitive.multiple_results else [results]


def _run_inlined(closed: Any, *args: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def value(x: Any) -> Any:
        return values[x] if isinstance(x, jex.Var) else x.val

    for equation in jaxpr.eqns:
        inputs = [value(x) for x in equation.invars]
        params = equation.params
        if equation.primitive.name in ("jit", "pjit"):
            results = _run_inlined(params["jaxpr"], *inputs)
        elif params.get("differentiated"):  # a block that `jax.checkpoint` recomputes
            block = jex.ClosedJaxpr(params["jaxpr"], ())
            results = _run_inlined(block, *_as_new(inputs, params["prevent_cse"]))
        else:
            results = apply(equation, *inputs)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _as_new(inputs: list[Any], are_hidden: Any) -> list[Any]:
    """Inputs that the compiler does not know again, so that it computes with them."""
    if not any(jax.tree.leaves(are_hidden)):
        return inputs
    return jax.lax.optimization_barrier(inputs)
