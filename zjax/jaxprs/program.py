"""A program as named values, from which a part can be taken and run alone."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zjax.jaxprs.interpret import Equation, apply, interpret
from zjax.jaxprs.versions import Closed

Name = core.Var
"""Of one value of a program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in an order in which they can run, none of which is a call.

    Args:
        closed: The equations; a constant is written in place and has no name.
    """

    closed: Closed

    @property
    def inputs(self) -> list[Name]:
        """Names of what goes in."""
        return list(self.closed.jaxpr.invars)

    @property
    def outputs(self) -> list[Any]:
        """Names of what comes out, or constants."""
        return list(self.closed.jaxpr.outvars)

    @property
    def equations(self) -> list[Equation]:
        """All operations."""
        return self.closed.eqns

    @property
    def shapes(self) -> dict[Name, jax.ShapeDtypeStruct]:
        """Of the inputs, and of what the equations return, in this order."""
        made = (x for each in self.equations for x in each.outvars)
        avals: dict[Name, Any] = {x: x.aval for x in (*self.inputs, *made)}
        return {x: jax.ShapeDtypeStruct(a.shape, a.dtype) for x, a in avals.items()}

    def __call__(self, *values: Any) -> list[Any]:
        """Runs the program, or traces it.

        Args:
            values: One for each input.

        Returns:
            One for each output.
        """
        return list(core.jaxpr_as_fun(self.closed)(*values))

    def compute(self, outputs: Sequence[Any], known: Mapping[Name, Any]) -> list[Any]:
        """Computes some values from others, and nothing else.

        Args:
            outputs: What is wanted.
            known: By name; what is wanted follows from these.

        Returns:
            One for each output.
        """
        part = self.part(known, outputs)
        return part(*(known[x] for x in part.inputs))

    def part(self, inputs: Iterable[Name], outputs: Sequence[Any]) -> "Program":
        """What leads from some values to others.

        Args:
            inputs: Names at which to stop; those that are not needed fall out.
            outputs: What is wanted.

        Returns:
            A program whose inputs are those needed of `inputs`, in their order, and
            after them whatever else of the inputs of this one is needed.
        """
        stops = dict.fromkeys(inputs)
        equations = [self.equations[number] for number in self.needed(outputs, stops)]
        atoms = itertools.chain(outputs, *(each.invars for each in equations))
        read = {*names_among(atoms)}
        own = [x for x in self.inputs if x not in stops]
        taken = [x for x in (*stops, *own) if x in read]
        jaxpr = self.closed.jaxpr.replace(
            invars=taken, outvars=list(outputs), eqns=equations
        )
        return Program(Closed(jaxpr, self.closed.consts))

    def needed(self, outputs: Iterable[Any], given: Iterable[Name] = ()) -> list[int]:
        """Numbers of the equations that compute these from what is given."""
        stops = {*given}
        wanted, found = {*names_among(outputs)} - stops, []
        for number in reversed(range(len(self.equations))):
            equation = self.equations[number]
            if wanted.intersection(equation.outvars):
                found.append(number)
                wanted |= {*names_among(equation.invars)} - stops
        return found[::-1]

    def made(self, numbers: Iterable[int]) -> set[Name]:
        """What equations return."""
        return {x for number in numbers for x in self.equations[number].outvars}

    def reached(self, names: Iterable[Name]) -> set[Name]:
        """These and what is computed from any of them."""
        found = self.sources(dict.fromkeys(names, frozenset({True})))
        return {x for x, sources in found.items() if sources}

    def sources(self, labels: Mapping[Name, frozenset]) -> dict[Name, frozenset]:
        """The labels of each value and of all that it is computed from."""
        found = collections.defaultdict(frozenset, labels)
        for equation in self.equations:
            joined = frozenset().union(
                *(found[x] for x in names_among(equation.invars))
            )
            found.update((x, joined.union(found[x])) for x in equation.outvars)
        return found

    def normal_form(self) -> tuple[str, list[Any]]:
        """The same text for programs that differ in names and scalars alone.

        Returns:
            The text, and the scalars that stand in the program, in order.
        """
        count = itertools.count()
        scalars: list[Any] = []
        lines: list[str] = []

        def text_of(constant: Any) -> str:
            if np.ndim(constant):
                return text_of_constant(constant)
            scalars.append(constant)
            return f"scalar {jnp.result_type(constant)}"

        def write(equation: Equation, operands: list[str]) -> list[str]:
            names = [str(next(count)) for _ in equation.outvars]
            params = sorted((key, str(x)) for key, x in equation.params.items())
            made = f"{equation.primitive.name} {params} {' '.join(operands)}"
            lines.append(f"{' '.join(names)} = {made}")
            return names

        names = [str(next(count)) for _ in self.inputs]
        kinds = [str(x.aval) for x in self.inputs]
        outputs = interpret(self.closed, names, write, text_of)
        return "\n".join([str(kinds), *lines, " ".join(outputs)]), scalars

    def lift(self, positions: Sequence[int]) -> Callable[..., list[Any]]:
        """Makes operands of some scalars.

        Args:
            positions: Among the scalars of `normal_form`, ascending.

        Returns:
            A function of the inputs and, at the end, a number for each.
        """

        def run(*values: Any) -> list[Any]:
            size = len(self.inputs)
            others = dict(zip(positions, values[size:], strict=True))
            count = itertools.count()

            def value_of(constant: Any) -> Any:
                is_array = np.ndim(constant)
                return constant if is_array else others.get(next(count), constant)

            return interpret(self.closed, values[:size], apply, value_of)

        return run


def trace(
    function: Callable[..., Any],
    *args: Any,
    rule: Callable[[Equation, list[Any]], Sequence[Any]] = apply,
) -> tuple[Program, Any]:
    """Writes a function of arrays as a program.

    Args:
        function: Pure.
        args: Trees of arrays, or of their shapes.
        rule: What is done in the place of each equation.

    Returns:
        A program of the leaves, in which the equations of functions called by name and
        of blocks that are recomputed are among the others; and the tree of shapes that
        the function returns.

    Example:
        >>> program, _ = trace(jax.jit(lambda x, y: (x + 1, x * y)), 2.0, 3.0)
        >>> [str(each.primitive) for each in program.equations]
        ['add', 'mul']
        >>> first = program.part(program.inputs, program.outputs[:1])
        >>> len(first.inputs), float(first(4.0)[0])
        (1, 5.0)
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

    def run(*values: Any) -> list[Any]:
        return interpret(closed, values, rule)

    inlined = jax.make_jaxpr(run)(*(x.aval for x in closed.jaxpr.invars))
    return Program(inlined), shapes


def names_among(atoms: Iterable[Any]) -> list[Name]:
    """Those that are no constants."""
    return [x for x in atoms if isinstance(x, Name)]


def is_in(x: Any, names: Set[Name]) -> bool:
    """Whether a value has one of these names."""
    return isinstance(x, Name) and x in names


def text_of_constant(value: Any) -> str:
    """The same for equal constants."""
    x = np.asarray(value)
    return f"{x.dtype}{x.shape}{x.tobytes().hex()}"


def sizes(*trees: Any) -> list[int]:
    """How many arrays each tree has."""
    return [len(jax.tree.leaves(tree)) for tree in trees]


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """The tree with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
