"""A jaxpr without calls: interpreted by a rule, or extracted and run in parts."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
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


def map_axes(mesh: Any, axes: Iterable[str], trace: Callable[[], T]) -> T:
    """Calls a function that traces a program inside `jax.shard_map` over some axes."""
    found: list[T] = []

    def run() -> jax.Array:
        found.append(trace())
        return jnp.zeros(())

    spec, names = jax.sharding.PartitionSpec(), set(axes)
    mapped = jax.shard_map(
        run, in_specs=(), out_specs=spec, axis_names=names, check_vma=False
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.eval_shape(mapped)
    return found[0]


def _behind_barrier(program: Closed) -> Closed:
    """Puts a barrier before a program, as `jax.checkpoint` does when it lowers."""
    run = core.jaxpr_as_fun(program)

    def run_hidden(*inputs: Any) -> list[Any]:
        return run(*jax.lax.optimization_barrier(inputs))

    return jax.make_jaxpr(run_hidden)(*(x.aval for x in program.jaxpr.invars))


Name = core.Var
"""The variable of one value of a program."""


# Compared by identity, as jaxprs of equal programs do not compare equal.
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in topological order, without calls.

    Args:
        closed: The jaxpr; constants are literals without a name.
    """

    closed: Closed

    @property
    def inputs(self) -> list[Name]:
        """Names of the inputs."""
        return list(self.closed.jaxpr.invars)

    @property
    def outputs(self) -> list[Any]:
        """Names of the outputs, or literals."""
        return list(self.closed.jaxpr.outvars)

    @property
    def equations(self) -> list[Equation]:
        """Equations in topological order."""
        return self.closed.eqns

    @property
    def shapes(self) -> dict[Name, jax.ShapeDtypeStruct]:
        """Shapes of the inputs, then of the results of the equations."""
        results = (x for each in self.equations for x in each.outvars)
        avals: dict[Name, Any] = {x: x.aval for x in (*self.inputs, *results)}
        return {x: jax.ShapeDtypeStruct(a.shape, a.dtype) for x, a in avals.items()}

    def __call__(self, *values: Any) -> list[Any]:
        """Runs or traces the program: one value per input, one result per output."""
        return list(core.jaxpr_as_fun(self.closed)(*values))

    def compute(self, outputs: Sequence[Any], known: Mapping[Name, Any]) -> list[Any]:
        """Computes outputs from known values, and nothing else."""
        part = self.part(known, outputs)
        return part(*(known[x] for x in part.inputs))

    def part(self, inputs: Iterable[Name], outputs: Sequence[Any]) -> "Program":
        """Extracts the program that computes `outputs` from `inputs`.

        The inputs of the part are the needed `inputs`, in order, then further inputs of
        the program.
        """
        stops = dict.fromkeys(inputs)
        equations = [self.equations[number] for number in self.needed(outputs, stops)]
        atoms = itertools.chain(outputs, *(each.invars for each in equations))
        read = {*names_among(atoms)}
        other_inputs = [x for x in self.inputs if x not in stops]
        needed_inputs = [x for x in (*stops, *other_inputs) if x in read]
        jaxpr = self.closed.jaxpr.replace(
            invars=needed_inputs, outvars=list(outputs), eqns=equations
        )
        return Program(Closed(jaxpr, self.closed.consts))

    def needed(self, outputs: Iterable[Any], known: Iterable[Name] = ()) -> list[int]:
        """Indices of the equations that compute outputs from known values."""
        stops = {*known}
        wanted, numbers = {*names_among(outputs)} - stops, []
        # Backwards, so that all readers of a value come before the equation of the
        # value.
        for number in reversed(range(len(self.equations))):
            equation = self.equations[number]
            if wanted.intersection(equation.outvars):
                numbers.append(number)
                wanted |= {*names_among(equation.invars)} - stops
        return numbers[::-1]

    def made(self, numbers: Iterable[int]) -> set[Name]:
        """Names of the results of equations."""
        return {x for number in numbers for x in self.equations[number].outvars}

    def reached(self, names: Iterable[Name]) -> set[Name]:
        """Finds all names that depend on any of `names`, which are included."""
        sources_by_name = self.sources(dict.fromkeys(names, frozenset({True})))
        return {x for x, sources in sources_by_name.items() if sources}

    def sources(self, labels: Mapping[Name, frozenset]) -> dict[Name, frozenset]:
        """Joins the labels of each value with the labels of all values before it."""
        labels_by_name = collections.defaultdict(frozenset, labels)
        for equation in self.equations:
            joined = frozenset().union(
                *(labels_by_name[x] for x in names_among(equation.invars))
            )
            labels_by_name.update(
                (x, joined.union(labels_by_name[x])) for x in equation.outvars
            )
        return labels_by_name

    def normal_form(self) -> tuple[str, list[Any]]:
        """Writes a text that programs share if only names or scalars differ.

        Returns the text and the scalar literals in order.
        """
        count = itertools.count()
        scalars: list[Any] = []
        lines: list[str] = []

        def text_of(constant: Any) -> str:
            if np.ndim(constant):  # only scalars become arguments of a shared program
                return text_of_constant(constant)
            scalars.append(constant)
            return f"scalar {jnp.result_type(constant)}"

        def write(equation: Equation, operands: list[str]) -> list[str]:
            names = [str(next(count)) for _ in equation.outvars]
            # Sorted, as the order of params is no part of a program.
            params = sorted((key, str(x)) for key, x in equation.params.items())
            text = f"{equation.primitive.name} {params} {' '.join(operands)}"
            lines.append(f"{' '.join(names)} = {text}")
            return names

        names = [str(next(count)) for _ in self.inputs]
        kinds = [str(x.aval) for x in self.inputs]
        outputs = interpret(self.closed, names, write, text_of)
        return "\n".join([str(kinds), *lines, " ".join(outputs)]), scalars

    def lift(self, positions: Sequence[int]) -> Callable[..., list[Any]]:
        """Makes a function of the inputs and the scalars at ascending `positions`."""

        def run(*values: Any) -> list[Any]:
            size = len(self.inputs)
            others = dict(zip(positions, values[size:], strict=True))
            # `interpret` reads constants in the order of `normal_form`.
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
    """Traces a function to a program, with calls and recomputed blocks inlined.

    Returns the program of the leaves, and the tree of shapes of the results.

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

    # Traced again, since `interpret` runs the equations inside calls one by one.
    inlined = jax.make_jaxpr(run)(*(x.aval for x in closed.jaxpr.invars))
    return Program(inlined), shapes


def names_among(atoms: Iterable[Any]) -> list[Name]:
    """Selects the atoms that are not literals."""
    return [x for x in atoms if isinstance(x, Name)]


def is_in(x: Any, names: Set[Name]) -> bool:
    """Whether an atom is one of the names."""
    return isinstance(x, Name) and x in names


def text_of_constant(value: Any) -> str:
    """Formats a constant; equal constants have equal texts."""
    x = np.asarray(value)
    return f"{x.dtype}{x.shape}{x.tobytes().hex()}"


def sizes(*trees: Any) -> list[int]:
    """Counts the arrays of each tree."""
    return [len(jax.tree.leaves(tree)) for tree in trees]


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """Rebuilds the structure of a tree with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
