"""Bytes that a device sends by collectives, counted in the traced program."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zjax.jaxprs.program import Equation, interpret, map_axes, programs_in, walk
from zjax.jaxprs.versions import Closed, mapped_axes

_GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
_PASSES = {
    **dict.fromkeys("psum psum_invariant unreduced_psum pmax pmin".split(), 2),
    **dict.fromkeys("reduce_scatter unreduced_reduce_scatter".split(), 1),
    **dict.fromkeys("all_to_all ragged_all_to_all pbroadcast".split(), 1),
    **dict.fromkeys(_GATHERS, 1),
}
"""How often a ring of n devices passes (n - 1) / n of the full array."""
_WRITTEN = {*_PASSES, "ppermute", "sharding_constraint"}


class Sent(collections.Counter):
    """Bytes by mesh axis."""

    def __mul__(self, times: int | float) -> "Sent":
        # Without axes on which nothing is sent.
        return Sent({axis: times * size for axis, size in self.items() if size})


def count_sent(program: Closed) -> Sent:
    """Counts the bytes that a device sends by the collectives of a program.

    A ring of n devices is assumed, in which each device sends (n - 1) / n of the full
    array for an all-gather, a reduce-scatter or an all-to-all, and twice as much for an
    all-reduce. A collective over several axes counts as one over each axis, the first
    axis with the smallest shards; the sum is the same. Two sharding constraints in a
    row count as the exchange between them. A scan counts each iteration, a conditional
    the branch that sends most, a loop of unknown length one iteration.

    Collectives that the compiler chooses are not in a traced program: the reductions of
    gradients and the gathers of ZeRO follow from the plan. Axes that are mapped around
    the program have the sizes of the mesh in use.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> program = jax.make_jaxpr(jax.shard_map(
        ...     lambda x: jax.lax.psum(x, "data"), mesh=AbstractMesh((4,), ("data",)),
        ...     in_specs=P("data"), out_specs=P()))(jax.numpy.ones(8))
        >>> count_sent(program)  # shards of 8 bytes
        Sent({'data': 12.0})
    """
    return _Count().visit(program)


def sends(program: Closed) -> bool:
    """Whether a program has collectives or sharding constraints."""
    return any(_name(equation) in _WRITTEN for equation in walk(program))


def _name(equation: Equation) -> str:
    """Name of the collective that an equation runs or starts."""
    return equation.primitive.name.removesuffix("_start")


class _Count:
    """Adds up the bytes of the equations of a program; follows sharding constraints."""

    def __init__(self) -> None:
        # A Counter is typed for whole numbers; shares of bytes add up as well.
        self.total: Any = Sent()

    def visit(self, program: Closed) -> Sent:
        """Counts a program, whose inputs have any sharding."""
        inputs = [None] * len(program.jaxpr.invars)
        interpret(program, inputs, self.rule, lambda _: None)
        return self.total * 1

    def rule(self, equation: Equation, shardings: list[Any]) -> list[Any]:
        """Counts an equation; returns the constrained shardings of the results."""
        name, params = _name(equation), equation.params
        if name == "sharding_constraint":
            if shardings[0] is not None:
                self.change(equation.invars[0].aval, shardings[0], params["sharding"])
            return [params["sharding"]]
        if name == "ppermute":
            moves = any(source != target for source, target in params["perm"])
            for axis in _axes(params)[:1]:
                self.total[axis] += moves * _bytes(equation.invars[0])
        elif name in _PASSES:
            self.add(equation)
        elif found := self.inside(equation):
            self.total.update(max(found, key=Sent.total))
        return [None] * len(equation.outvars)

    def inside(self, equation: Equation) -> list[Sent]:
        """Counts the programs in an equation, of which one runs."""
        name, params = equation.primitive.name, equation.params

        def count() -> list[Sent]:
            return [_Count().visit(program) for program in programs_in(equation)]

        if name == "shard_map":
            return map_axes(params["mesh"], mapped_axes(equation), count)
        times = params["length"] if name == "scan" else 1
        return [each * times for each in count()]

    def add(self, equation: Equation) -> None:
        """Counts the passes of a ring along one axis after another."""
        name, params = _name(equation), equation.params
        axes, groups = _axes(params), params.get("axis_index_groups")
        shape = jax.sharding.get_abstract_mesh().shape
        sizes = [len(groups[0])] if groups else [shape[axis] for axis in axes]
        # The operand of a gather is a shard; others are the full array.
        shard = _PASSES[name] * _bytes(*equation.invars)
        shard /= 1 if name in _GATHERS else math.prod(sizes)
        for axis, size in zip(axes, sizes, strict=True):
            self.total[axis] += (size - 1) * shard
            # What this axis has gathered goes along the next one.
            shard *= size

    def change(self, aval: Any, before: Any, after: Any) -> None:
        """Counts the exchange between two shardings of one array."""
        shape, num_bytes = before.mesh.shape, aval.size * aval.dtype.itemsize
        old, new = _dims(before), _dims(after)
        shard = num_bytes / math.prod(shape[axis] for axis in old)
        for axis, dim in old.items():
            size = shape[axis]
            if axis not in new and P.UNCONSTRAINED in after.spec:
                continue  # the compiler may leave the axis where it is
            if axis not in new:
                self.total[axis] += (size - 1) * shard
                shard *= size
            elif new[axis] != dim:
                self.total[axis] += (size - 1) / size * shard


def _axes(params: Mapping[str, Any]) -> Sequence[str]:
    """Names of the mesh axes of a collective; a mapped dim has a number."""
    given = params["axes"] if "axes" in params else params["axis_name"]
    axes = (given,) if isinstance(given, str) else given
    return [axis for axis in axes if isinstance(axis, str)]


def _bytes(*atoms: Any) -> float:
    return float(sum(x.aval.size * x.aval.dtype.itemsize for x in atoms))


def _dims(sharding: Any) -> dict[str, int]:
    """Dim that each mesh axis shards."""
    entries = ((entry,) if isinstance(entry, str) else entry for entry in sharding.spec)
    dims = enumerate(entry if isinstance(entry, tuple) else () for entry in entries)
    return {axis: dim for dim, axes in dims for axis in axes}
