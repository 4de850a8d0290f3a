"""Interprets a jaxpr with a rule for its equations, and iterates over inner jaxprs.

The rule returns values to run or trace a program again, or abstract facts to analyse
it. The interpreter inlines calls.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core

from zjax.jaxprs import primitives
from zjax.jaxprs.versions import Closed, close, is_program

Equation = Any
"""A `jax.extend.core.JaxprEqn`: a primitive with its operands and parameters."""
T = TypeVar("T")


def apply(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation: the rule that runs a program."""
    settings = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*inputs, **settings)
    return list(results) if equation.primitive.multiple_results else [results]


def interpret(
    program: Closed,
    inputs: Sequence[T],
    rule: Callable[[Equation, list[T]], Sequence[T]],
    constant: Callable[[Any], T] = lambda value: value,
) -> list[T]:
    """Propagates values, or facts about them, from inputs to outputs.

    Args:
        program: A closed jaxpr.
        inputs: One value for each input.
        rule: `rule(equation, inputs) -> outputs`, for an equation that is not a call.
        constant: Maps a literal or constant to its value, each time it is read, in the
            order of the equations.

    Returns:
        One value for each output.

    Example:
        >>> program = jax.make_jaxpr(jax.jit(lambda x, y: (2 * x, x + y)))(1.0, 1.0)
        >>> join = lambda equation, sets: [set().union(*sets)]
        >>> found = interpret(program, [{"x"}, {"y"}], join, lambda _: set())
        >>> [sorted(names) for names in found]
        [['x'], ['x', 'y']]
    """
    consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known = dict(zip(program.jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> T:
        if isinstance(atom, core.Literal):
            return constant(atom.val)
        return constant(consts[atom]) if atom in consts else known[atom]

    for equation in program.eqns:
        operands = [read(atom) for atom in equation.invars]
        call = called_by(equation)
        if call is None:
            results = rule(equation, operands)
        else:
            results = interpret(call, operands, rule, constant)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def called_by(equation: Equation) -> Closed | None:
    """The program that an equation only calls; None for other equations.

    A block that `jax.checkpoint` recomputes starts with a barrier, so that the compiler
    does not merge it with the forward pass.
    """
    if equation.primitive.name not in primitives.CALLS:
        return None
    (program,) = programs_in(equation)
    params = equation.params
    is_hidden = params.get("differentiated") and any(
        jax.tree.leaves(params["prevent_cse"])
    )
    return _behind_barrier(program) if is_hidden else program


def programs_in(equation: Equation) -> list[Closed]:
    """The jaxprs among the parameters of an equation: calls, branches and bodies."""
    return [close(x) for x in jax.tree.leaves(equation.params) if is_program(x)]


def walk(program: Closed) -> Iterator[Equation]:
    """All equations, each followed by those of its inner jaxprs."""
    for equation in program.eqns:
        yield equation
        for inner in programs_in(equation):
            yield from walk(inner)


def _behind_barrier(program: Closed) -> Closed:
    run = core.jaxpr_as_fun(program)

    def run_hidden(*inputs: Any) -> list[Any]:
        return run(*jax.lax.optimization_barrier(inputs))

    return jax.make_jaxpr(run_hidden)(*(x.aval for x in program.jaxpr.invars))
