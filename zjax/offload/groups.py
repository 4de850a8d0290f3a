"""An update split into one program per group of parameters, where that is exact.

An optimizer runs group by group if the new arrays of a group depend on the group's
arrays and on numbers that all groups share. Numbers made of the gradients of many
groups, such as the global norm, are computed first: each group is measured by itself,
and the measurements are combined. All dependences come from the traced update: any
optax transformation either runs exactly or is refused.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.jaxprs import program as traced
from zjax.jaxprs.program import Equation, Name, Program, apply, interpret, programs_in

SHARED = -1
"""The group of arrays that all groups read."""


@dataclasses.dataclass(frozen=True)
class GroupedPrograms:
    """The programs of an update; arrays keep the names from the whole update.

    Args:
        measures: Program per group, of scalars made of the group's gradients alone.
        combine: Program from shared arrays and these scalars to the new shared arrays,
            in the order of `shared_outputs`, followed by `global_numbers`.
        updates: Program per group, of new arrays in the order of the whole update.
        shared_outputs: Positions of the shared arrays among the outputs.
    """

    measures: tuple[Program, ...]
    combine: Program
    updates: tuple[Program, ...]
    shared_outputs: tuple[int, ...]

    @property
    def global_numbers(self) -> tuple[Name, ...]:
        """Scalars of several groups that updates read, such as the gradient norm."""
        outputs = self.combine.outputs[len(self.shared_outputs) :]
        return tuple(x for x in outputs if isinstance(x, Name))


def group_programs(
    program: Program,
    input_groups: Sequence[int],
    output_groups: Sequence[int],
    *,
    num_groups: int,
    is_gradient: Sequence[bool],
    is_loss: Sequence[bool],
    optimizer: str,
    paths: Sequence[str],
) -> GroupedPrograms:
    """Splits the program of an update by group, or raises PlanError.

    `program` maps state, gradients and loss to new state and metrics. Each input and
    output has a group, 0 to num_groups - 1 or `SHARED`. `is_gradient` marks inputs that
    are known before any update runs, `is_loss` inputs that are known only after all
    gradients. `optimizer` and `paths`, one per output, serve the error.
    """
    flow = _Flow(program, input_groups, is_gradient, is_loss)
    updates, problems = [], []
    for group in range(num_groups):
        wanted = [i for i, g in enumerate(output_groups) if g == group]
        part = program.part(flow.global_numbers, [program.outputs[i] for i in wanted])
        updates.append(part)
        if flow.reads_others(part, {group, SHARED}):
            problems.append(paths[wanted[0]])
    shared = tuple(i for i, g in enumerate(output_groups) if g == SHARED)
    read = dict.fromkeys(x for part in updates for x in part.inputs)
    numbers = [x for x in read if x in flow.global_numbers]
    wanted = [*(program.outputs[i] for i in shared), *numbers]
    combine = program.part(flow.measures, wanted)
    if flow.reads_others(combine, {SHARED}):
        # The joint program says only that some output is at fault; try each output.
        alone = (program.part(flow.measures, [program.outputs[i]]) for i in shared)
        problems += [
            paths[i]
            for i, part in zip(shared, alone, strict=True)
            if flow.reads_others(part, {SHARED})
        ]
    if problems:
        raise PlanError(_refusal(optimizer, problems))
    measured = [x for x in combine.inputs if x in flow.measures]
    measures = tuple(
        program.part((), [x for x in measured if flow.measures[x] == group])
        for group in range(num_groups)
    )
    return GroupedPrograms(measures, combine, tuple(updates), shared)


def _refusal(optimizer: str, paths: list[str]) -> Problem:
    """Describes the arrays whose updates need arrays of several groups."""
    names = list(dict.fromkeys(paths))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Problem(
        "optimizer",
        optimizer,
        f"updates {names[0]}{more} from the parameters or the state of other arrays, "
        "so that it cannot run group by group",
        "set zero.offload=None, or use an optimizer that updates each array "
        "from itself and from the gradients' norm",
    )


class _Flow:
    """The groups that each value of a program depends on.

    `measures` are scalars of one group's gradients, with the group; `global_numbers`
    are scalars of the gradients of several groups.
    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[int],
        is_gradient: Sequence[bool],
        is_loss: Sequence[bool],
    ):
        self.groups = dict(zip(program.inputs, groups, strict=True))
        owned = {x for x, group in self.groups.items() if group != SHARED}
        gradients = itertools.compress(program.inputs, is_gradient)
        # Parameters and optimizer state are on the devices only while their group
        # updates.
        late = program.reached(owned.difference(gradients))
        # A measure runs when gradients arrive, before the loss of the batch is known.
        last = program.reached(itertools.compress(program.inputs, is_loss))
        source_groups = program.sources({x: frozenset({self.groups[x]}) for x in owned})
        scalars = {
            x: source_groups[x]
            for x, shape in program.shapes.items()
            if x not in late and not shape.shape and x not in self.groups
        }
        met = [x for x, sources in scalars.items() if len(sources) > 1]
        # An ordered set: the order of outputs must not depend on hashes.
        self.global_numbers = dict.fromkeys(met)
        self.measures = {
            x: min(sources)
            for x, sources in scalars.items()
            if len(sources) == 1 and x not in last
        }

    def reads_others(self, part: Program, allowed: set[int]) -> bool:
        """Whether a part reads arrays of groups that are not allowed."""
        return any(
            x in self.groups and self.groups[x] not in allowed for x in part.inputs
        )


def by_group(pairs: Iterable[tuple[Any, int]], num_groups: int) -> list[list[Any]]:
    """Collects the items of each group, from pairs of an item and a group."""
    items: list[list[Any]] = [[] for _ in range(num_groups)]
    for item, group in pairs:
        if group != SHARED:
            items[group].append(item)
    return items


def trace(function: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces a function of trees to a program of leaves that ties no arrays together.

    A `cond` becomes a select of both branches; while loops stay whole. Returns the tree
    of output shapes, too.

    Example:
        >>> barrier = lambda x, y: jax.lax.optimization_barrier((x, y))
        >>> found, _ = trace(barrier, 2.0, 3.0)
        >>> len(found.part(found.inputs, found.outputs[:1]).inputs)
        1
    """
    return traced.trace(function, *args, rule=_apply_by_array)


def _apply_by_array(equation: Equation, inputs: list[Any]) -> list[Any]:
    """Applies one equation, with barriers and conditionals taken apart by array."""
    kind = equation.primitive.name
    if kind == "optimization_barrier":
        # A barrier before many arrays is as good as one before each.
        return [x for each in inputs for x in apply(equation, [each])]
    if kind == "cond":
        # A `cond` over the whole state would make every array depend on all groups.
        which, *operands = inputs
        branches = programs_in(equation)
        cases = [interpret(each, operands, _apply_by_array) for each in branches]
        return [
            jax.lax.select_n(which, *map(jnp.asarray, results))
            for results in zip(*cases, strict=True)
        ]
    return apply(equation, inputs)
