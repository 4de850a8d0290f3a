"""A program in which it shows, array by array, what a result depends on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.jaxprs import program
from zjax.jaxprs.interpret import Equation, apply, interpret, programs_in


def trace(function: Callable[..., Any], *args: Any) -> tuple[program.Program, Any]:
    """Writes a function of arrays as a program that ties no arrays together.

    Args:
        function: Pure.
        args: Trees of arrays, or of their shapes.

    Returns:
        A program of the leaves, with both branches of a `cond` and a choice in its
        place, while loops stay whole; and the tree of shapes that the function returns.

    Example:
        >>> barrier = lambda x, y: jax.lax.optimization_barrier((x, y))
        >>> found, _ = trace(barrier, 2.0, 3.0)
        >>> len(found.part(found.inputs, found.outputs[:1]).inputs)
        1
    """
    return program.trace(function, *args, rule=_apply_by_array)


def _apply_by_array(equation: Equation, inputs: list[Any]) -> list[Any]:
    kind = equation.primitive.name
    if kind == "optimization_barrier":
        # A barrier before many arrays is as good as one before each.
        return [x for each in inputs for x in apply(equation, [each])]
    if kind == "cond":
        which, *operands = inputs
        branches = programs_in(equation)
        cases = [interpret(each, operands, _apply_by_array) for each in branches]
        return [
            jax.lax.select_n(which, *map(jnp.asarray, results))
            for results in zip(*cases, strict=True)
        ]
    return apply(equation, inputs)
