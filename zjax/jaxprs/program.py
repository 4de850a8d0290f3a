"""A program as a list of operations, from which a part can be taken and run alone.

Calls are written out and a `cond` becomes both of its branches and a choice, so that
what a result depends on shows array by array. Loops stay whole.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

CALLS = frozenset("jit pjit closed_call custom_jvp_call custom_vjp_call remat2".split())
"""Primitives that do what their program does."""

Name = int
"""Of one array of a program."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number or array that stands in a program.

    Args:
        value: A scalar or an array.
    """

    value: Any

    @property
    def text(self) -> str:
        """The same for equal constants."""
        x = np.asarray(self.value)
        return f"{x.dtype}{x.shape}{x.tobytes().hex()}"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Args:
        text: Says what it computes, without its operands.
        compute: Function of the operands that returns a list.
        inputs: Operands.
        outputs: Names of the results.
    """

    text: str
    compute: Callable[..., Sequence[Any]]
    inputs: tuple[Name | Constant, ...]
    outputs: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Operations in an order in which they can run.

    Args:
        operations: All of them.
        inputs: Names of what goes in.
        outputs: What comes out.
        shapes: Of every named array.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name | Constant, ...]
    shapes: Mapping[Name, Any]

    def __call__(self, *values: Any) -> list[Any]:
        """Runs the program, or traces it.

        Args:
            values: One for each input.

        Returns:
            One for each output.
        """
        known = dict(zip(self.inputs, values, strict=True))

        def read(atom: Name | Constant) -> Any:
            return atom.value if isinstance(atom, Constant) else known[atom]

        for each in self.operations:
            results = each.compute(*map(read, each.inputs))
            known |= dict(zip(each.outputs, results, strict=True))
        return [jnp.asarray(read(atom)) for atom in self.outputs]

    def part(self, inputs: Iterable[Name], outputs: Sequence[Any]) -> "Program":
        """What leads from some arrays to others.

        Args:
            inputs: Names at which to stop; those that are not needed fall out.
            outputs: What is wanted.

        Returns:
            A program whose inputs are those needed of `inputs`, in their order, and
            after them whatever else of the inputs of this one is needed.
        """
        stops = dict.fromkeys(inputs)
        needed = {x for x in outputs if not isinstance(x, Constant)}
        kept = []
        for each in reversed(self.operations):
            wanted = [x for x in each.outputs if x in needed and x not in stops]
            if wanted:
                kept.append(each)
                needed |= {x for x in each.inputs if not isinstance(x, Constant)}
        own = [x for x in self.inputs if x in needed and x not in stops]
        taken = (*(x for x in stops if x in needed), *own)
        return Program(tuple(reversed(kept)), taken, tuple(outputs), self.shapes)

    def normal_form(self) -> tuple[str, tuple[Constant, ...]]:
        """The same text for programs that differ in names and numbers alone.

        Returns:
            The text, and the scalars of the program in order.
        """
        numbers: dict[Name, int] = {}
        scalars: list[Constant] = []

        def text_of(atom: Name | Constant) -> str:
            if not isinstance(atom, Constant):
                return str(numbers.setdefault(atom, len(numbers)))
            if np.ndim(atom.value):
                return atom.text
            scalars.append(atom)
            return f"scalar {jnp.result_type(atom.value)}"

        lines = [f"{text_of(x)}: {self.shapes[x]}" for x in self.inputs]
        for each in self.operations:
            operands = " ".join(map(text_of, each.inputs))
            names = " ".join(map(text_of, each.outputs))
            lines.append(f"{names} = {each.text} {operands}")
        lines.append(" ".join(map(text_of, self.outputs)))
        return "\n".join(lines), tuple(scalars)

    def lift(self, positions: Sequence[int]) -> "Program":
        """Makes inputs of some scalars.

        Args:
            positions: Among the scalars of `normal_form`.

        Returns:
            A program with more inputs at the end, one for each.
        """
        count = itertools.count()
        fresh = dict(
            zip(positions, itertools.count(max(self.shapes) + 1), strict=False)
        )
        shapes = dict(self.shapes)

        def one(atom: Name | Constant) -> Name | Constant:
            if not isinstance(atom, Constant) or np.ndim(atom.value):
                return atom
            position = next(count)
            if position not in fresh:
                return atom
            dtype = jnp.result_type(atom.value)
            shapes[fresh[position]] = jax.ShapeDtypeStruct((), dtype)
            return fresh[position]

        operations = tuple(
            dataclasses.replace(each, inputs=tuple(map(one, each.inputs)))
            for each in self.operations
        )
        outputs = tuple(map(one, self.outputs))
        return Program(operations, (*self.inputs, *fresh.values()), outputs, shapes)


def trace(function: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Writes a function of arrays as a program.

    Args:
        function: Of trees of arrays.
        args: Arrays, or ShapeDtypeStructs.

    Returns:
        A program of the leaves, and the tree of shapes that the function returns.

    Example:
        >>> program, _ = trace(lambda x, y: {"a": x + 1, "b": x * y}, 2.0, 3.0)
        >>> first = program.part(program.inputs, program.outputs[:1])
        >>> len(first.inputs), float(first(4.0)[0])
        (1, 5.0)
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    writer = _Writer()
    inputs = tuple(writer.name(x.aval) for x in closed.jaxpr.invars)
    outputs = writer.write(closed.jaxpr, inputs, closed.consts)
    program = Program(
        tuple(writer.operations), inputs, tuple(outputs), dict(enumerate(writer.shapes))
    )
    return program, shapes


class _Writer:
    def __init__(self):
        self.operations: list[Operation] = []
        self.shapes: list[Any] = []

    def name(self, aval: Any) -> Name:
        self.shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return len(self.shapes) - 1

    def write(
        self, jaxpr: Any, inputs: Sequence[Any], consts: Sequence[Any]
    ) -> list[Any]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= dict(zip(jaxpr.constvars, map(Constant, consts), strict=True))

        def read(atom: Any) -> Name | Constant:
            return Constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self.write_eqn(eqn, [read(atom) for atom in eqn.invars])
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def write_eqn(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.write_call(
                eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], inputs
            )
        if name == "cond":
            which, *operands = inputs
            cases = [self.write_call(b, operands) for b in eqn.params["branches"]]
            return [
                self.choose(which, results, var.aval)
                for *results, var in zip(*cases, eqn.outvars, strict=True)
            ]
        outputs = tuple(self.name(var.aval) for var in eqn.outvars)
        settings = sorted((key, str(value)) for key, value in eqn.params.items())
        compute = functools.partial(_bind, eqn.primitive, eqn.params)
        whole = Operation(f"{name} {settings}", compute, tuple(inputs), outputs)
        # A barrier before many arrays is as good as one before each.
        is_barrier = name == "optimization_barrier"
        self.operations += _one_by_one(whole) if is_barrier else [whole]
        return outputs

    def write_call(self, program: Any, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = getattr(program, "jaxpr", program)
        return self.write(jaxpr, inputs, getattr(program, "consts", ()))

    def choose(self, which: Any, cases: list[Any], aval: Any) -> Name:
        chosen = self.name(aval)
        self.operations.append(Operation("choose", _choose, (which, *cases), (chosen,)))
        return chosen


def _one_by_one(each: Operation) -> list[Operation]:
    pairs = zip(each.inputs, each.outputs, strict=True)
    return [
        dataclasses.replace(each, inputs=(x,), outputs=(name,)) for x, name in pairs
    ]


def _bind(primitive: Any, params: dict[str, Any], *values: Any) -> Sequence[Any]:
    results = primitive.bind(*values, **params)
    return results if primitive.multiple_results else [results]


def _choose(which: Any, *cases: Any) -> list[Any]:
    index = jnp.clip(jnp.asarray(which, jnp.int32), 0, len(cases) - 1)
    return [jax.lax.select_n(index, *map(jnp.asarray, cases))]
