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
    programs_in,
    walk,
)
from zjax.jaxprs.versions import Closed, mapped_axes, scan_sizes
from zjax_kernels import abstract

_ALIASES = RESHAPES | frozenset(
    "name reduce_precision optimization_barrier pvary pcast".split()
)
"""Primitives whose results are the operands, in memory."""
_RECOMPUTED = ("remat2", "checkpoint")
"""Names of the primitive of `jax.checkpoint`."""
_HOST = "host"


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program, compared by identity.

    Args:
        num_bytes: Bytes of the value.
        sources: Values to store for the value to be cheap to compute; empty for values
            that follow from parameters or constants alone.
        origins: Results of products, kernels and gathers that the value depends on.
        is_read: Whether a product, a kernel or a gather reads the value from memory.
    """

    num_bytes: float
    sources: frozenset["Value"] = frozenset()
    origins: frozenset["Value"] = frozenset()
    is_read: bool = False


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

    Args:
        program: Jaxpr of a loss, or of a part of one.
        trained: Whether the gradient of each input is computed.

    Returns:
        The forward pass. A residual that is an input of the program is that input.

    Example:
        >>> program = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(1.0)
        >>> forward = differentiate(program, [True])
        >>> [str(each.primitive) for each in forward.eqns], len(forward.jaxpr.outvars)
        (['exp', 'sin', 'cos'], 2)
    """
    avals = [x.aval for x in program.jaxpr.invars]
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in avals]
    chosen = [a and b for a, b in zip(trained, floating, strict=True)]

    def forward(*inputs: Any) -> list[Any]:
        def run(*learned: Any) -> Any:
            rest = iter(learned)
            given = zip(inputs, chosen, strict=True)
            values = [next(rest) if is_chosen else x for x, is_chosen in given]
            return core.jaxpr_as_fun(program)(*values)

        learned = [x for x, is_chosen in zip(inputs, chosen, strict=True) if is_chosen]
        return jax.tree.leaves(jax.vjp(run, *learned)[1])

    # Rules of gradients are traced anew, with the kernels that the rules call.
    with abstract.abstract_kernels():
        return jax.make_jaxpr(forward)(*avals)


def residual_bytes(
    forward: Closed,
    is_free: Sequence[bool],
    *,
    is_exact: bool = False,
    keeps: Callable[..., Any] | None = None,
) -> float:
    """Counts the bytes of the residuals of a program of `differentiate`.

    Args:
        forward: Program with the residuals as outputs.
        is_free: Whether each input of the program, a parameter or a batch, is in memory
            anyway.
        is_exact: Whether the compiler has to save all residuals unchanged, as in a
            scan. Else each residual counts as itself, or as the stored values that it
            is cheap to compute from, whichever are smaller.
        keeps: Policy of `jax.checkpoint` under which the backward pass recomputes the
            program from the values that the policy saves; None for no recomputation.

    Returns:
        Bytes on a device. Residuals in the memory of the host count nothing.
    """
    storage = _Storage(keeps=keeps)
    inputs = _inputs(forward, is_free)
    values = storage.visit(forward, inputs)
    if keeps is not None:
        return _total(frozenset[Value]().union(*(x.sources for x in values)))
    on_device = [not _is_on_host(x) for x in forward.jaxpr.outvars]
    values = [x for x, stays in zip(values, on_device, strict=True) if stays]
    if is_exact:
        free = {x for x, is_free in zip(inputs, is_free, strict=True) if is_free}
        return _total(x for x in dict.fromkeys(values) if x not in free)
    return _total(_cheapest(values))


def _cheapest(values: Iterable[Value]) -> dict[Value, None]:
    """Chooses what to store so that values are stored, or cheap to compute."""
    chosen = dict[Value, None]()
    for value in values:
        missing = [x for x in value.sources if x not in chosen]
        cheaper = _total(missing) <= value.num_bytes
        if value.is_read or not cheaper:
            missing = [value] if value.sources else []
        chosen.update(dict.fromkeys(missing))
    return chosen


def working_bytes(forward: Closed, is_free: Sequence[bool]) -> float:
    """Counts the residuals of a block, and the operands and results of kernels.

    The arguments are as for `residual_bytes`. Conditionals count the branch that
    stores most.
    """
    storage = _Storage()
    values = storage.visit(forward, _inputs(forward, is_free))
    return _total(_cheapest(values) | storage.in_kernels)


def transient_bytes(program: Closed, is_free: Sequence[bool]) -> float:
    """Counts the largest result of a product, and the operands made of the result.

    These live from one product to the next, and are no outputs of the program: in the
    head of a language model, logits and the gradient of the logits.
    """
    storage = _Storage()
    saved = _cheapest(storage.visit(program, _inputs(program, is_free)))
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
    blocks = (
        inner
        for equation in walk(program)
        if equation.primitive.name in _RECOMPUTED
        for inner in programs_in(equation)
    )
    return max(map(_block_bytes, blocks), default=0.0)


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


def _inputs(program: Closed, is_free: Sequence[bool]) -> list[Value]:
    avals = [x.aval for x in program.jaxpr.invars]
    sizes = [bytes_of([x]) for x in avals]
    pairs = zip(sizes, is_free, strict=True)
    return [Value(size) if free else _stored(size) for size, free in pairs]


def _is_on_host(x: Any) -> bool:
    return _HOST in str(getattr(x.aval, "memory_space", "")).lower()


class _Storage:
    """Follows the values of a program, and the equations that read each value."""

    def __init__(
        self, copies: int = 1, keeps: Callable[..., Any] | None = None
    ) -> None:
        self.copies, self.keeps = copies, keeps
        self.read = dict[Value, None]()
        self.results = dict[Value, None]()
        self.in_kernels = dict[Value, None]()

    def visit(self, program: Closed, inputs: Sequence[Value]) -> list[Value]:
        """Returns the outputs of a program."""
        return interpret(program, inputs, self.rule, lambda _: Value(0.0))

    def rule(self, equation: Equation, inputs: list[Value]) -> list[Value]:
        """Returns the results of an equation."""
        name = equation.primitive.name
        sizes = [self.copies * bytes_of([x.aval]) for x in equation.outvars]
        if name == "shard_map":
            return self._enter_devices(equation, inputs)
        if self.keeps is not None and self._is_kept(equation):
            return [_stored(size) for size in sizes]
        if name in _ALIASES:
            return [*inputs]
        if name in CHEAP or self.keeps is not None:
            sources = frozenset[Value]().union(*(x.sources for x in inputs))
            origins = frozenset[Value]().union(*(x.origins for x in inputs))
            make = _computed if self.keeps is None else Value
            return [make(size, sources, origins) for size in sizes]
        self._read(inputs)
        if name == "cond":
            self._enter_largest(equation, inputs)
        elif name == "scan":
            self._enter_body(equation, inputs)
        results = [_stored(size) for size in sizes]
        self.results.update(dict.fromkeys(results))
        if name == abstract.NAME:
            touched = [x for x in (*inputs, *results) if x.sources]
            self.in_kernels.update(dict.fromkeys(touched))
        return results

    def _is_kept(self, equation: Equation) -> bool:
        """Whether the policy saves the results of an equation."""
        assert self.keeps is not None
        avals = (x.aval for x in equation.invars)
        return self.keeps(equation.primitive, *avals, **equation.params) is True

    def _read(self, values: Iterable[Value]) -> None:
        for value in values:
            value.is_read = True
            self.read[value] = None

    def _merge(self, other: "_Storage") -> None:
        self.read |= other.read
        self.results |= other.results
        self.in_kernels |= other.in_kernels

    def _enter_largest(self, equation: Equation, inputs: list[Value]) -> None:
        """Enters the branch of a conditional that stores most."""
        branches = []
        for program in programs_in(equation):
            branch = _Storage(self.copies)
            branch.visit(program, inputs[1:])
            branches.append(branch)

        def size(branch: _Storage) -> float:
            return _total(branch.in_kernels)

        self._merge(max(branches, key=size))

    def _enter_body(self, equation: Equation, inputs: list[Value]) -> None:
        """Enters one iteration of a scan."""
        (program,), length = programs_in(equation), equation.params["length"]
        sliced = inputs[sum(scan_sizes(equation)) :]
        whole = inputs[: len(inputs) - len(sliced)]
        slices = [
            dataclasses.replace(x, num_bytes=x.num_bytes / length) for x in sliced
        ]
        self.visit(program, [*whole, *slices])

    def _enter_devices(self, equation: Equation, inputs: list[Value]) -> list[Value]:
        """Enters the program of one device; values count once per device."""
        (program,), mesh = programs_in(equation), equation.params["mesh"]
        devices = math.prod(mesh.shape[axis] for axis in mapped_axes(equation))
        inside = _Storage(self.copies * devices, self.keeps)
        outputs = inside.visit(program, inputs)
        self._merge(inside)
        return outputs
