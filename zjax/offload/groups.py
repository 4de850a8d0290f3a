"""An update cut into groups of arrays, where that changes nothing.

An optimizer may be run group by group if a group's new arrays depend on its own arrays
and on numbers that all groups share. Numbers made of the gradients of many groups, as
the norm that clipping takes, are computed first: each group is measured by itself and
what was measured is combined. All of this is read off the update's own program, so that
any optax transformation either runs exactly or is refused.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from zjax.errors import PlanError, Problem
from zjax.jaxprs.program import Name, Program

SHARED = -1
"""The group of what all groups read."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """An update in parts; `names` of a part are those of the whole program.

    Args:
        measures: For each group, numbers from its gradients alone.
        combine: From shared arrays and those numbers to the new shared arrays, in the
            order of `shared_outputs`, and after them the numbers that updates read.
        updates: For each group, its new arrays in the order of the whole.
        shared_outputs: Positions of the shared arrays among the outputs.
    """

    measures: tuple[Program, ...]
    combine: Program
    updates: tuple[Program, ...]
    shared_outputs: tuple[int, ...]

    @property
    def meetings(self) -> tuple[Name, ...]:
        """Numbers that updates read and only `combine` knows."""
        found = self.combine.outputs[len(self.shared_outputs) :]
        return tuple(x for x in found if isinstance(x, Name))


def cut_update(
    program: Program,
    input_groups: Sequence[int],
    output_groups: Sequence[int],
    *,
    num_groups: int,
    is_gradient: Sequence[bool],
    is_loss: Sequence[bool],
    optimizer: str,
    paths: Sequence[str],
) -> Cut:
    """Cuts the program of an update.

    Args:
        program: From state, gradients and loss to the new state and metrics.
        input_groups: Of each input; `SHARED` for what all groups read.
        output_groups: Of each output.
        num_groups: Groups are 0 to num_groups - 1.
        is_gradient: Of each input, whether it is known before any update runs.
        is_loss: Of each input, whether it is known only after all gradients.
        optimizer: Its name, for errors.
        paths: Of each output, for errors.

    Returns:
        The parts.

    Raises:
        PlanError: Some array depends on other groups in a way that streaming would
            change; names the optimizer and the arrays.
    """
    flow = _Flow(program, input_groups, is_gradient, is_loss)
    updates, problems = [], []
    for group in range(num_groups):
        wanted = [i for i, g in enumerate(output_groups) if g == group]
        part = program.part(flow.meetings, [program.outputs[i] for i in wanted])
        updates.append(part)
        if flow.strangers(part, {group, SHARED}):
            problems.append(paths[wanted[0]])
    shared = tuple(i for i, g in enumerate(output_groups) if g == SHARED)
    read = dict.fromkeys(x for part in updates for x in part.inputs)
    meetings = [x for x in read if x in flow.meetings]
    wanted = [*(program.outputs[i] for i in shared), *meetings]
    combine = program.part(flow.measures, wanted)
    if flow.strangers(combine, {SHARED}):
        problems += [
            paths[i]
            for i in shared
            if flow.strangers(
                program.part(flow.measures, [program.outputs[i]]), {SHARED}
            )
        ]
    if problems:
        raise PlanError(_refusal(optimizer, problems))
    measured = [x for x in combine.inputs if x in flow.measures]
    measures = tuple(
        program.part((), [x for x in measured if flow.measures[x] == group])
        for group in range(num_groups)
    )
    return Cut(measures, combine, tuple(updates), shared)


def _refusal(optimizer: str, paths: list[str]) -> Problem:
    names = list(dict.fromkeys(paths))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Problem(
        "optimizer",
        optimizer,
        f"updates {names[0]}{more} from the parameters or the state of other arrays, "
        "so that it cannot run group by group",
        "set zero.optimizer_memory=device, or use an optimizer that updates each array "
        "from itself and from the gradients' norm",
    )


class _Flow:
    """Which groups each array of a program depends on."""

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
        late = program.reached(owned.difference(gradients))
        last = program.reached(itertools.compress(program.inputs, is_loss))
        found = program.sources({x: frozenset({self.groups[x]}) for x in owned})
        numbers = {
            x: found[x]
            for x, shape in program.shapes.items()
            if x not in late and not shape.shape and x not in self.groups
        }
        met = [x for x, sources in numbers.items() if len(sources) > 1]
        self.meetings = dict.fromkeys(met)
        self.measures = {
            x: min(sources)
            for x, sources in numbers.items()
            if len(sources) == 1 and x not in last
        }

    def strangers(self, part: Program, allowed: set[int]) -> bool:
        """Whether a part reads arrays of other groups."""
        return any(
            x in self.groups and self.groups[x] not in allowed for x in part.inputs
        )
