"""Interprets a jaxpr with a rule for equations, and names sets of primitives."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core

from zjax.jaxprs.versions import Closed, close, is_program


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CALLS = _names("jit pjit closed_call custom_jvp_call custom_vjp_call remat2")
"""Primitives that only run an inner program."""

ARITHMETIC = _names("add sub mul div max min pow select_n")
"""Primitives that combine or select entries of several operands."""

COMPARISONS = _names("eq ne lt le gt ge")
ROUNDINGS = _names("floor ceil round")

EXACT = (
    COMPARISONS
    | ROUNDINGS
    | _names("sin cos tan exp exp2 expm1 log log1p rem sign is_finite")
)
"""Primitives whose results depend on the last digits of the operands."""

ELEMENTWISE = (
    ARITHMETIC
    | EXACT
    | _names(
        """abs add_any and cbrt clamp convert_element_type copy erf integer_pow logistic
        neg nextafter not one_minus_square or reduce_precision rsqrt sqrt square
        stop_gradient tanh"""
    )
)
"""Primitives of which each entry depends on one entry of each operand."""

REDUCTIONS = _names("reduce_max reduce_min reduce_sum")

RESHAPES = _names("reshape squeeze transpose")
"""Primitives that return all entries of the operand in another shape or order."""

MOVES = RESHAPES | _names(
    "broadcast_in_dim concatenate dynamic_slice pad reshard rev slice split stack"
)
"""Primitives that return entries of the operands unchanged."""

CHEAP = (
    ELEMENTWISE
    | REDUCTIONS
    | MOVES
    | _names("all_gather bitcast_convert_type iota optimization_barrier")
)
"""Primitives that cost no more than reading the operands, or gathering parameters."""


Equation = Any
"""A `jax.extend.core.JaxprEqn`: a primitive with its operands and parameters."""
T = TypeVar("T")


def apply(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation: the rule that runs a program."""
    # `bind` takes functions where equations hold jaxprs.
    settings = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*inputs, **settings)
    return list(results) if equation.primitive.multiple_results else [results]


def interpret(
    program: Closed,
    inputs: Sequence[T],
    rule: Callable[[Equation, list[T]], Sequence[T]],
    constant: Callable[[Any], T] = lambda value: value,
) -> list[T]:
    """Propagates values, or facts about values, from inputs to outputs.

    `rule(equation, inputs) -> outputs` handles equations that are no calls. `constant`
    maps a literal or constant, each time it is read, in the order of the equations.

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
            # Entered, so that no rule has to know calls.
            results = interpret(call, operands, rule, constant)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def called_by(equation: Equation) -> Closed | None:
    """Returns the program that an equation only calls; None for other equations.

    A block that `jax.checkpoint` recomputes starts with a barrier, so that the compiler
    does not merge the block with the forward pass.
    """
    if equation.primitive.name not in CALLS:
        return None
    (program,) = programs_in(equation)
    params = equation.params
    is_hidden = params.get("differentiated") and any(
        jax.tree.leaves(params["prevent_cse"])
    )
    return _behind_barrier(program) if is_hidden else program


def programs_in(equation: Equation) -> list[Closed]:
    """Lists the jaxprs among the parameters of an equation, such as branches."""
    return [close(x) for x in jax.tree.leaves(equation.params) if is_program(x)]


def walk(program: Closed) -> Iterator[Equation]:
    """Yields all equations, each followed by the equations of inner jaxprs."""
    for equation in program.eqns:
        yield equation
        for inner in programs_in(equation):
            yield from walk(inner)


def _behind_barrier(program: Closed) -> Closed:
    """Puts a barrier before a program, as `jax.checkpoint` does when it lowers."""
    run = core.jaxpr_as_fun(program)

    def run_hidden(*inputs: Any) -> list[Any]:
        return run(*jax.lax.optimization_barrier(inputs))

    return jax.make_jaxpr(run_hidden)(*(x.aval for x in program.jaxpr.invars))
