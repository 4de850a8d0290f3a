"""The update of a step as compiled programs, one per group of parameters."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zjax.errors import PlanError, Problem
from zjax.jaxprs.program import Name
from zjax.offload.compiled import CompiledGroup, Jit, compile_groups
from zjax.offload.groups import (
    SHARED,
    GroupedPrograms,
    by_group,
    group_programs,
    trace,
)
from zjax.settings.schema import Optimizer, Precision
from zjax.sharding.naming import path_of, position_finder
from zjax.sharding.param_plans import optimizer_name
from zjax.sharding.placement import unpad_tree
from zjax.sharding.plan import Plan, staged_plan
from zjax.train.state import TrainState
from zjax.train.update import Schedule, make_update
from zjax.typing import Loss, Metrics, Params, Stack

BY_PARAMETER = ("master", "ema", "params")
"""Parts of the state that hold one array per parameter."""


class GroupUpdate(NamedTuple):
    """The update of one group of parameters.

    Args:
        measure: Program of the numbers `measured`, from the group's gradients.
        update: Program of the group's new arrays.
        measured: Names of numbers.
        state: Names of the arrays of the state that the update reads.
        params: Names of the group's parameters in the compute dtype, by leaf.
        grads: Names of the group's gradients, by leaf.
        positions: Leaves of the state that the update computes.
    """

    measure: CompiledGroup
    update: CompiledGroup
    measured: list[Name]
    state: list[Name]
    params: list[Name]
    grads: list[Name]
    positions: list[int]


class GroupedUpdate:
    """`update(state, grads, loss)` of `zjax.train.update`, group by group.

    Arrays go by the names in the trace of the whole update. `state_names`, `grad_names`
    and `loss_names` are the inputs by leaf, `groups` has one `GroupUpdate` for each
    group, and `numbers` the scalars that updates read besides. `combine` computes the
    leaves `shared` of the result, then `global_numbers`.

    Args:
        tx: Optax gradient transformation.
        plan: Placement of every array.
        rows: Plans of the state, all on the devices.
        optimizer: Settings that an update reads.
        precision: Settings of loss scaling.
        schedule: Learning rate by applied step, for the metrics.
        stack: The model as a line of blocks, if it is one.
        groups: Group of each parameter.
        grad_rows: Plans of the gradients as they arrive.
        jit: `jax.jit` with compiler options.

    Raises:
        PlanError: The optimizer cannot run group by group.
    """

    def __init__(
        self,
        tx: Any,
        plan: Plan,
        rows: TrainState,
        optimizer: Optimizer,
        precision: Precision,
        schedule: Schedule | None,
        stack: Stack | None,
        *,
        groups: Sequence[int],
        grad_rows: Any,
        jit: Jit,
    ):
        on_device = staged_plan(plan)
        state, totals = _arrays(plan.model_state), _totals(stack)
        loss = Loss(_number(), _number(), state, {}, totals)
        inputs = (_arrays(rows), _arrays(grad_rows), loss)
        update = _of_stored_gradients(
            tx, on_device, optimizer, precision, schedule, stack
        )
        program, outputs = trace(update, *inputs)
        names, input_keys, output_keys = program.inputs, _keys(inputs), _keys(outputs)
        leaves = iter(names)
        self.state_names, self.grad_names, self.loss_names = (
            list(itertools.islice(leaves, len(jax.tree.leaves(tree))))
            for tree in inputs
        )
        group_of, num_groups = _grouping(plan, groups), max(groups) + 1
        input_groups = dict(zip(names, map(group_of, input_keys), strict=True))
        # Output 0 is the state, output 1 the metrics, which belong to no group.
        output_groups = [
            group_of(keys) if keys[0].idx == 0 else SHARED for keys in output_keys
        ]
        programs = group_programs(
            program,
            list(input_groups.values()),
            output_groups,
            num_groups=num_groups,
            is_gradient=[name in self.grad_names for name in names],
            is_loss=[name in self.loss_names for name in names],
            optimizer=optimizer_name(tx),
            paths=[path_of(keys[1:]) for keys in output_keys],
        )
        self.tree, self.num_outputs = jax.tree.structure(outputs), len(output_keys)
        self.global_numbers = programs.global_numbers
        self.shapes = program.shapes
        row_leaves = jax.tree.leaves(rows)
        placed = [*row_leaves, *jax.tree.leaves(grad_rows)]
        # Not strict: the last inputs, of the loss, have no plan.
        self.shapes.update(zip(names, (row.abstract for row in placed), strict=False))
        # These inputs are known only after the backward pass.
        late = {*programs.global_numbers, *self.loss_names}
        self.waits = any(late & {*part.inputs} for part in programs.updates)
        self.shared = [i for i, group in enumerate(output_groups) if group == SHARED]
        # Outputs after the state, the metrics, have no place.
        places = dict(enumerate(row.stored for row in row_leaves))
        combined = [*map(places.get, self.shared), *(None for _ in self.global_numbers)]
        (self.combine,) = compile_groups(
            [programs.combine], jit, out_shardings=[combined]
        )
        positions = by_group(enumerate(output_groups), num_groups)
        updates = compile_groups(
            programs.updates,
            jit,
            # All groups read shared arrays, which must survive the first update.
            donated=frozenset(x for x in self.state_names if input_groups[x] != SHARED),
            out_shardings=[[places[i] for i in indices] for indices in positions],
        )
        measures = compile_groups(programs.measures, jit)
        params = [x for x, k in zip(names, input_keys, strict=True) if _is_param(k)]
        self.groups = self._group_updates(
            programs, measures, updates, params, input_groups, positions
        )
        read = set().union(*(part.inputs for part in programs.updates))
        for group in self.groups:
            read -= {*group.state, *group.grads}
        self.numbers = [name for name in self.shapes if name in read]

    def _group_updates(
        self,
        programs: GroupedPrograms,
        measures: Sequence[CompiledGroup],
        updates: Sequence[CompiledGroup],
        params: Sequence[Name],
        groups: Mapping[Name, int],
        positions: Sequence[list[int]],
    ) -> list[GroupUpdate]:
        """Collects programs and names into one `GroupUpdate` per group."""
        read = set().union(*(part.inputs for part in programs.updates))
        state = [name for name in self.state_names if name in read]
        columns = (  # the fields of GroupUpdate
            measures,
            updates,
            [part.outputs for part in programs.measures],
            *(
                by_group(((name, groups[name]) for name in names), len(updates))
                for names in (state, params, self.grad_names)
            ),
            positions,
        )
        return [GroupUpdate(*row) for row in zip(*columns, strict=True)]

    def abstract_calls(self) -> Iterator[tuple[Any, ...]]:
        """Yields each distinct jitted update with operands to lower it."""
        updates = (group.update for group in self.groups)
        # Groups of equal form share one jitted function.
        for update in {id(each.run): each for each in updates}.values():
            operands = (self.shapes[name] for name in update.inputs)
            yield update.run, *operands, *update.scalars

    def rebuild(self, leaves: Mapping[int, Any]) -> tuple[TrainState, Metrics]:
        """Rebuilds the new state and the metrics from all outputs by position."""
        ordered = [leaves[i] for i in range(self.num_outputs)]
        return jax.tree.unflatten(self.tree, ordered)


def _keys(tree: Any) -> list[Any]:
    return [keys for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_param(keys: Any) -> bool:
    return keys[0].idx == 0 and keys[1].name == "params"


def _of_stored_gradients(
    tx: Any,
    plan: Plan,
    optimizer: Optimizer,
    precision: Precision,
    schedule: Schedule | None,
    stack: Stack | None,
) -> Callable[[TrainState, Params, Loss], tuple[TrainState, Metrics]]:
    """Returns the update as a function of gradients in stored shapes."""
    update = make_update(tx, plan, optimizer, precision, schedule, stack)

    def no_loss_function(params: Params) -> jax.Array:
        raise PlanError(
            Problem(
                "optimizer",
                optimizer_name(tx),
                "evaluates the loss within its update, when the parameters have gone",
                "set zero.offload=None",
            )
        )

    def run(state: TrainState, grads: Params, loss: Loss) -> tuple[TrainState, Metrics]:
        grads = unpad_tree(grads, plan.grads)
        return update(state, grads, loss, no_loss_function)

    return run


def _grouping(plan: Plan, groups: Sequence[int]) -> Callable[[Any], int]:
    """Returns a function from a leaf's path to the leaf's group.

    Paths are in `(state, grads, loss)` or `(state, metrics)`.
    """
    position = position_finder(plan.master)
    trees = (*BY_PARAMETER, "opt_state")

    def group_of(keys: Any) -> int:
        part, *rest = keys
        if part.idx == 0 and rest[0].name in trees:
            index = position(rest[1:])
        else:
            index = position(rest) if part.idx == 1 else None
        return SHARED if index is None else groups[index]

    return group_of


def _arrays(rows: Any) -> Any:
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.stored_shape, row.stored_dtype), rows
    )


def _totals(stack: Stack | None) -> Any:
    """Returns the shapes of the totals of a stack."""
    return tuple(
        {
            name: jax.ShapeDtypeStruct((segment.num_blocks, *shape), jnp.int32)
            for name, shape in segment.totals.items()
        }
        for segment in (stack.segments if stack else ())
    )


def _number() -> Any:
    return jax.ShapeDtypeStruct((), jnp.float32)
