"""Bytes that a program stores for the gradient, counted in the traced program.

A value is stored where a matrix product, a kernel or a gather writes or reads it.
Elementwise operations, reductions and moves fuse into the readers of the results: the
backward pass repeats such operations instead of reading results from memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zjax.jaxprs.program import (
    CHEAP,
    RESHAPES,
    Equation,
    interpret,
    map_axes,
    programs_in,
)
from zjax.jaxprs.versions import Closed, mapped_axes, scan_sizes, without_dead_code
from zjax_kernels import abstract

_ALIASES = RESHAPES | frozenset(
    "name reduce_precision optimization_barrier pvary pcast".split()
)
"""Primitives whose results are the operands, in memory."""


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program, compared by identity.

    Args:
        num_bytes: Bytes of the value.
        sources: Values to store for the value to be cheap to compute; empty for values
            that follow from parameters or constants alone.
        origins: Results of products, kernels and gathers that the value depends on.
    """

    num_bytes: float
    sources: frozenset["Value"] = frozenset()
    origins: frozenset["Value"] = frozenset()


def _stored(num_bytes: float) -> Value:
    """Makes a value that is in memory whatever reads it."""
    value = Value(num_bytes)
    value.sources = value.origins = frozenset({value})
    return value


def _computed(num_bytes: float, sources: Any, origins: Any) -> Value:
    """Makes the result of a cheap operation."""
    value = Value(num_bytes, sources, origins)
    # A sum of two products, a mean or a mask: smaller than what it is computed from.
    if 2 * num_bytes <= _total(sources):
        value.sources = frozenset({value})
    return value


def differentiate(program: Closed, trained: Sequence[bool]) -> Closed:
    """Traces the forward pass of a program, with the residuals as outputs.

    `trained` says of each input whether the gradient is computed. A residual that is an
    input of the program is that input.

    Example:
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(1.0)
        >>> forward = differentiate(program, [True])
        >>> [str(each.primitive) for each in forward.eqns], len(forward.jaxpr.outvars)
        (['exp', 'sin', 'cos'], 2)
    """

    def forward(*inputs: Any) -> list[Any]:
        _, pull = _linearize(core.jaxpr_as_fun(program), trained, inputs)
        return jax.tree.leaves(pull)

    return _trace(forward, program)


def with_gradient(
    program: Closed, trained: Sequence[bool], keeps: Callable[..., Any] | None = None
) -> Closed:
    """Traces the forward and the backward pass of a program, without dead code.

    The arguments are as for `differentiate` and `residual_bytes`.
    """
    run = core.jaxpr_as_fun(program)

    def both(*inputs: Any) -> Any:
        block = run if keeps is None else jax.checkpoint(run, policy=keeps)
        outputs, pull = _linearize(block, trained, inputs)
        return outputs, pull([jnp.ones_like(x) for x in outputs])

    traced = _trace(both, program)
    return without_dead_code(traced, [True] * len(traced.jaxpr.invars))[0]


def _linearize(
    run: Callable[..., Sequence[Any]], trained: Sequence[bool], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Returns the floating-point outputs, and the function of the cotangents."""
    pairs = enumerate(zip(inputs, trained, strict=True))
    chosen = [i for i, (x, is_trained) in pairs if is_trained and _is_floating(x)]

    def of_trained(*learned: Any) -> list[Any]:
        known = dict(zip(chosen, learned, strict=True))
        values = (known.get(i, x) for i, x in enumerate(inputs))
        return [x for x in run(*values) if _is_floating(x)]

    return jax.vjp(of_trained, *(inputs[i] for i in chosen))


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _trace(run: Callable[..., Any], program: Closed) -> Closed:
    """Traces a function of the inputs of a program."""
    # Rules of gradients are traced anew, with the kernels that the rules call.
    with abstract.abstract_kernels():
        return jax.make_jaxpr(run)(*(x.aval for x in program.jaxpr.invars))


def residual_bytes(
    forward: Closed,
    is_free: Sequence[bool],
    *,
    is_exact: bool = False,
    keeps: Callable[..., Any] | None = None,
) -> float:
    """Counts the bytes on a device of the residuals of a program of `differentiate`.

    Free inputs, parameters and batches, are in memory anyway. With a policy `keeps` of
    `jax.checkpoint` the backward pass recomputes the program from what the policy
    saves. An exact count has all residuals unchanged, as the compiler saves them in a
    scan. Else each residual counts as itself, or as the stored values that it is cheap
    to compute from, whichever are smaller.
    """
    storage = _Storage(keeps=keeps)
    values = storage.enter(forward, is_free)
    if keeps is not None:
        return _total(frozenset[Value]().union(*(x.sources for x in values)))
    pairs = zip(values, forward.jaxpr.outvars, strict=True)
    values = [value for value, x in pairs if not _is_on_host(x)]
    if is_exact:
        return _total(x for x in dict.fromkeys(values) if x not in storage.free)
    return _total(storage.cheapest(values))


def _is_on_host(x: Any) -> bool:
    return "host" in str(getattr(x.aval, "memory_space", "")).lower()


def working_bytes(forward: Closed, is_free: Sequence[bool]) -> float:
    """Counts the residuals of a block, and the operands and results of kernels.

    The arguments are as for `residual_bytes`. Conditionals count the branch that
    stores most.
    """
    storage = _Storage()
    values = storage.enter(forward, is_free)
    return _total(storage.cheapest(values) | storage.in_kernels)


def transient_bytes(program: Closed, is_free: Sequence[bool]) -> float:
    """Counts the largest result of a product, and the operands made of the result.

    These live from one product to the next, and are no outputs of the program: in the
    head of a language model, logits and the gradient of the logits.
    """
    storage = _Storage()
    saved = storage.cheapest(storage.enter(program, is_free))
    totals = {x: x.num_bytes for x in storage.results if x not in saved}
    for value in storage.read:
        for source in value.origins - {value}:
            if source in totals:
                totals[source] += value.num_bytes
    return max(totals.values(), default=0.0)


def recomputed_bytes(program: Closed) -> float:
    """Counts the bytes of the largest block that the backward pass recomputes.

    These are the blocks of `jax.checkpoint` in a program that is not differentiated.
    """
    return max(map(_recomputed_in, program.eqns), default=0.0)


def _recomputed_in(equation: Equation) -> float:
    """Counts the bytes of the largest block in an equation, on all devices."""
    name, programs = equation.primitive.name, programs_in(equation)
    if name == "shard_map":
        mesh, axes = equation.params["mesh"], mapped_axes(equation)
        number = math.prod(mesh.shape[axis] for axis in axes)
        return number * map_axes(mesh, axes, lambda: recomputed_bytes(programs[0]))
    count = _block_bytes if name == "remat2" else recomputed_bytes
    return max(map(count, programs), default=0.0)


def _block_bytes(block: Closed) -> float:
    """Counts the values that a recomputed block stores, without the inputs."""
    every = [True] * len(block.jaxpr.invars)
    return working_bytes(differentiate(block, every), every)


def bytes_of(shapes: Iterable[Any]) -> float:
    """Counts the bytes of arrays.

    Example:
        >>> bytes_of([jax.ShapeDtypeStruct((2, 3), "float32")])
        24.0
    """
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes))


def _total(values: Iterable[Value]) -> float:
    return math.fsum(x.num_bytes for x in values)


Values = dict[Value, None]
"""A set of values in order."""


class _Storage:
    """Follows the values of a program; `copies` of each are on all devices.

    With a policy `keeps`, results are made of what the policy saves.
    """

    def __init__(
        self, copies: int = 1, keeps: Callable[..., Any] | None = None
    ) -> None:
        self.copies, self.keeps = copies, keeps
        # What products, kernels and gathers read and write, and kernels alone.
        self.read, self.results, self.in_kernels = Values(), Values(), Values()
        self.free = frozenset[Value]()

    def enter(self, program: Closed, is_free: Sequence[bool]) -> list[Value]:
        """Returns the outputs of a program, some of whose inputs are free."""
        sizes = (bytes_of([x.aval]) for x in program.jaxpr.invars)
        pairs = zip(sizes, is_free, strict=True)
        inputs = [Value(size) if free else _stored(size) for size, free in pairs]
        self.free = frozenset(x for x in inputs if not x.sources)
        return self.visit(program, inputs)

    def cheapest(self, values: Iterable[Value]) -> Values:
        """Chooses what to store so that values are stored, or cheap to compute."""
        chosen = Values()
        for value in values:
            missing = [x for x in value.sources if x not in chosen]
            if value in self.read or _total(missing) > value.num_bytes:
                missing = [value] if value.sources else []
            chosen.update(dict.fromkeys(missing))
        return chosen

    def visit(self, program: Closed, inputs: Sequence[Value]) -> list[Value]:
        """Returns the outputs of a program."""
        return interpret(program, inputs, self.rule, lambda _: Value(0.0))

    def rule(self, equation: Equation, inputs: list[Value]) -> list[Value]:
        """Returns the results of an equation."""
        name, params = equation.primitive.name, equation.params
        sizes = [self.copies * bytes_of([x.aval]) for x in equation.outvars]
        if name == "shard_map":
            (program,), mesh = programs_in(equation), params["mesh"]
            devices = math.prod(mesh.shape[axis] for axis in mapped_axes(equation))
            self.copies *= devices
            outputs = self.visit(program, inputs)
            self.copies //= devices
            return outputs
        if self.keeps is not None:
            avals = (x.aval for x in equation.invars)
            if self.keeps(equation.primitive, *avals, **params) is True:
                return [_stored(size) for size in sizes]
        if name in _ALIASES:
            return [*inputs]
        if name in CHEAP or self.keeps is not None:
            sources = frozenset[Value]().union(*(x.sources for x in inputs))
            origins = frozenset[Value]().union(*(x.origins for x in inputs))
            make = _computed if self.keeps is None else Value
            return [make(size, sources, origins) for size in sizes]
        self.read.update(dict.fromkeys(inputs))
        if name == "cond":
            self._enter_largest(equation, inputs[1:])
        elif name == "scan":
            self._enter_body(equation, inputs)
        results = [_stored(size) for size in sizes]
        self.results.update(dict.fromkeys(results))
        if name == abstract.NAME:
            touched = (x for x in (*inputs, *results) if x.sources)
            self.in_kernels.update(dict.fromkeys(touched))
        return results

    def _enter_largest(self, equation: Equation, inputs: list[Value]) -> None:
        """Enters the branch of a conditional that stores most."""
        branches = []
        for program in programs_in(equation):
            branches.append(_Storage(self.copies))
            branches[-1].visit(program, inputs)
        largest = max(branches, key=lambda branch: _total(branch.in_kernels))
        self.read |= largest.read
        self.results |= largest.results
        self.in_kernels |= largest.in_kernels

    def _enter_body(self, equation: Equation, inputs: list[Value]) -> None:
        """Enters one iteration of a scan."""
        (program,), length = programs_in(equation), equation.params["length"]
        number = sum(scan_sizes(equation))
        slices = [
            dataclasses.replace(x, num_bytes=x.num_bytes / length)
            for x in inputs[number:]
        ]
        self.visit(program, [*inputs[:number], *slices])
