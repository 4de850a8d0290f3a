"""Finds the batch arrays to which a model applies parameters, by tracing the loss."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import DataError, Problem
from zjax.jaxprs.interpret import ARITHMETIC, EXACT, Equation, interpret, programs_in
from zjax.jaxprs.versions import Closed
from zjax.sharding.mesh import trace
from zjax.sharding.paths import path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Batch, Model


class Origin(NamedTuple):
    """Parameters and batch arrays that a traced value depends on."""

    is_param: bool = False
    """Whether the value depends on parameters alone, and has one dim or more."""
    arrays: frozenset[str] = frozenset()
    """Arrays of the batch that the value depends on."""
    untransformed: frozenset[str] = frozenset()
    """Arrays combined so far only with constants, or elementwise with parameters."""


def find_inputs(model: Model, batch: Batch) -> tuple[str, ...]:
    """Finds the floating-point arrays of a batch that a model applies parameters to.

    Images and masks enter products with parameters; targets and weights meet only
    results, or parameters elementwise. Arrays first read by a function such as `sin` or
    by a comparison, such as timestamps, need full precision and are left out, as are
    arrays of fewer than two dims.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    names = [path_of(keys) if _may_be_cast(x) else "" for keys, x in leaves]
    if not any(names):
        return ()
    params, state = jax.eval_shape(model.init, abstract_key())
    # The order of the arguments is the order of `origins`.
    program = trace(model.loss, params, state, batch, abstract_key())
    origins = [Origin(is_param=len(x.shape) > 0) for x in jax.tree.leaves(params)]
    # Statistics of the model count as constants.
    origins += [Origin() for _ in jax.tree.leaves(state)]
    sets = [frozenset({name} - {""}) for name in names]
    origins += [
        Origin(arrays=origin_set, untransformed=origin_set) for origin_set in sets
    ]
    walk = _Walk()
    walk.visit(program, [*origins, Origin()])
    # One read in full precision is enough to keep an array from the cast.
    return tuple(name for name in names if name in walk.read - walk.exact)


def _may_be_cast(x: Any) -> bool:
    """Whether an array has two dims or more and is floating-point."""
    return len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating)


def with_cast(model: Model, batch: Batch, names: Sequence[str] | None) -> Model:
    """Sets the arrays of a batch that are cast to the compute dtype.

    Names of None take the model's `cast`, or the result of `find_inputs`.
    """
    if names is None:
        cast = find_inputs(model, batch) if model.cast is None else model.cast
        return dataclasses.replace(model, cast=cast)
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {path_of(keys): x for keys, x in leaves}
    fit = [p for p, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)]
    problem = "is no floating-point array of the batch"
    remedy = f"use any of {', '.join(fit)}" if fit else "leave it out"
    wrong = [Problem("cast", x, problem, remedy) for x in names if x not in fit]
    if wrong:
        raise DataError(*wrong)
    return dataclasses.replace(model, cast=tuple(names))


class _Walk:
    """Propagates origins through a program; iterates loops to a fixed point."""

    def __init__(self) -> None:
        self.read: frozenset[str] = frozenset()
        self.exact: frozenset[str] = frozenset()

    def visit(self, program: Closed, origins: Sequence[Origin]) -> list[Origin]:
        """Returns the origins of a program's outputs."""
        return interpret(program, origins, self.results, lambda _: Origin())

    def results(self, equation: Equation, origins: list[Origin]) -> list[Origin]:
        """Returns the origins of an equation's outputs, entering nested programs."""
        name, programs = equation.primitive.name, programs_in(equation)
        if name == "cond":
            # The first operand selects the branch.
            cases = [self.visit(program, origins[1:]) for program in programs]
            return [_joined(case) for case in zip(*cases, strict=True)]
        if len(programs) == 1 and _has_operands_of(programs[0], equation):
            if name == "scan":
                return self.loop(programs[0], equation.params, origins)
            return self.visit(programs[0], origins)
        return self.operation(equation, origins)

    def loop(
        self, body: Closed, params: dict[str, Any], origins: list[Origin]
    ) -> list[Origin]:
        """Returns the origins of a scan's outputs."""
        first, number = params["num_consts"], params["num_carry"]
        # Reaches a fixed point, as the sets of arrays only grow.
        while True:
            outputs = self.visit(body, origins)
            carried = slice(first, first + number)
            pairs = zip(origins[carried], outputs, strict=False)
            carry = [_joined(pair) for pair in pairs]
            if carry == origins[carried]:
                return outputs
            origins = [*origins[:first], *carry, *origins[first + number :]]

    def operation(self, equation: Equation, origins: list[Origin]) -> list[Origin]:
        """Returns the origins of a primitive's outputs, and records reads."""
        arrays = _joined(origins).arrays
        meets_params = any(origin.is_param for origin in origins)
        untransformed = _joined(origins).untransformed
        name, (*out_vars,) = equation.primitive.name, equation.outvars
        # Products and the like read an array; sums with a parameter do not.
        is_read = meets_params and name not in ARITHMETIC
        if is_read:
            self.read |= arrays
        # A cast to integers needs the exact value, as indices do.
        loses_fraction = any(
            not jnp.issubdtype(x.aval.dtype, jnp.floating) for x in out_vars
        )
        if name in EXACT or (name == "convert_element_type" and loses_fraction):
            self.exact |= untransformed
        # A value computed from results is no input any more.
        if is_read or arrays != untransformed:
            untransformed = frozenset()
        is_param = meets_params and not arrays
        return [
            Origin(is_param and len(x.aval.shape) > 0, arrays, untransformed)
            for x in out_vars
        ]


def _has_operands_of(program: Closed, equation: Equation) -> bool:
    """Whether a nested program has the operands and results of an equation."""
    ins, outs = len(program.jaxpr.invars), len(program.jaxpr.outvars)
    return (ins, outs) == (len(equation.invars), len(equation.outvars))


def _joined(origins: Sequence[Origin]) -> Origin:
    """Joins the origins of all values that a value may come from."""
    arrays = frozenset[str]().union(*(origin.arrays for origin in origins))
    mixed = [origin.arrays - origin.untransformed for origin in origins]
    untransformed = arrays - frozenset[str]().union(*mixed)
    is_param = any(origin.is_param for origin in origins) and not arrays
    return Origin(is_param, arrays, untransformed)
