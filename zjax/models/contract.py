"""Contract of user losses and models, and the batch arrays of a model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.errors import DataError, ModelError, Problem
from zjax.jaxprs.program import ARITHMETIC, EXACT, Equation, interpret, programs_in
from zjax.jaxprs.versions import Closed, scan_sizes
from zjax.ops.keys import key_from_data
from zjax.sharding.mesh import trace
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Batch, Metrics, Model, ModelState, Params


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
                return self.loop(programs[0], scan_sizes(equation), origins)
            return self.visit(programs[0], origins)
        return self.operation(equation, origins)

    def loop(
        self, body: Closed, sizes: tuple[int, int], origins: list[Origin]
    ) -> list[Origin]:
        """Returns the origins of a scan's outputs."""
        first, number = sizes
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


def call_loss(
    loss_fn: Callable[..., Any], view: Any, batch: Batch, key: jax.Array | None
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Calls a user's loss, and normalises the result to (loss, weight, metrics).

    All are float32[]; the weight has no gradient. The loss may return a mean loss
    alone.
    """
    out = loss_fn(view, batch, key)
    value, weight, metrics = out if _is_triple(out) else (out, 1.0, {})
    problems = [] if _is_triple(out) or _is_array(out) else [_not_a_loss(out)]
    if not problems:
        scalars = {f"metrics/{name}": x for name, x in metrics.items()}
        problems = [
            Problem(name, _describe(x), "is not a scalar", _scalar_remedy(name))
            for name, x in {"loss": value, "weight": weight, **scalars}.items()
            if not _is_array(x) or jnp.shape(x) != ()
        ]
    if not problems and not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        text, remedy = "is not floating-point", "return a loss with a gradient"
        problems = [Problem("loss", _describe(value), text, remedy)]
    if problems:
        raise ModelError(*problems)
    metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
    # Weights average microbatches; a gradient through them would bias the loss.
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return jnp.asarray(value, jnp.float32), weight, metrics


def evaluate_loss(
    loss_fn: Callable[..., Any], make_view: Callable[[], Any], batch: Batch
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Calls a user's loss in evaluation, with a key of None.

    A loss that needs a key, such as a diffusion loss, is called again with a key
    derived from the batch: equal batches get equal noise.
    """
    try:
        return call_loss(loss_fn, make_view(), batch, None)
    except TypeError as error:
        # Only errors from a key of None are retried.
        if "NoneType" not in str(error):
            raise
        try:
            results = call_loss(loss_fn, make_view(), batch, key_from_data(batch))
        except Exception:
            raise error from None  # the first error is the user's own
    logging.warning(
        "loss_fn draws from its key in evaluation too: the same for the same batch"
    )
    return results


def _scalar_remedy(name: str) -> str:
    """Returns the remedy for a result that is not a scalar."""
    return "return its sum" if name == "weight" else "return its mean"


def _is_triple(out: Any) -> bool:
    """Whether a loss returned (loss, weight, metrics)."""
    return isinstance(out, tuple) and len(out) == 3 and isinstance(out[2], dict)


def _is_array(x: Any) -> bool:
    """Whether a value is an array or a number."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | int)


def _not_a_loss(out: Any) -> Problem:
    """Describes a result that is no loss."""
    text = "is neither a loss nor (loss, weight, metrics)"
    return Problem("loss_fn(...)", _describe(out), text, "return one of the two")


def _describe(x: Any) -> str:
    """Returns text such as `float32[2,3]` or `(float32[], dict)`."""
    if _is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        dims = ",".join(map(str, jnp.shape(x)))
        return f"{jnp.result_type(x)}[{dims}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(_describe, x))})"
    return type(x).__name__


def check_params(model: Any, params: Params) -> None:
    """Refuses parameters that cannot be trained; `model` is named in the message."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    problems = [
        Problem(
            path_of(keys),
            _describe(x),
            "is not floating-point",
            "keep it in another collection than the parameters",
        )
        for keys, x in leaves
        if not _is_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    if not leaves:
        text, remedy = "has no parameters", "give it layers, and use them in loss_fn"
        problems = [Problem("model", type(model).__name__, text, remedy)]
    if problems:
        raise ModelError(*problems)


def check_model_state(before: ModelState, after: ModelState) -> None:
    """Refuses a step that changes paths, shapes or dtypes of the model state."""
    old, new = _described(before), _described(after)
    problems = [
        Problem(
            f"model_state/{path}",
            new.get(path, old.get(path)),
            _change(old.get(path), new.get(path)),
            "keep the shapes of the model state, and sow what is for one step only",
        )
        for path in dict.fromkeys((*old, *new))  # in order, each path once
        if old.get(path) != new.get(path)
    ]
    if problems:
        raise ModelError(*problems)


def _described(tree: Any) -> dict[str, str]:
    """Describes the arrays of a tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(keys): _describe(x) for keys, x in leaves}


def _change(old: str | None, new: str | None) -> str:
    """Describes what happened to an array of the model state."""
    if old is None:
        return "appeared in loss_fn"
    return "vanished in loss_fn" if new is None else f"was {old} before loss_fn"


def without_weak_types(tree: Any) -> Any:
    """Converts leaves to arrays without weak types, which would change in a scan."""

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x

    return jax.tree.map(one, tree)
