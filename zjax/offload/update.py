"""The update of a step as compiled parts, one per group of parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.jaxprs.program import Name
from zjax.offload.dataflow import trace
from zjax.offload.groups import SHARED, cut_update
from zjax.offload.parts import Jit, compile_parts
from zjax.sharding.in_use import plan_on_device
from zjax.sharding.opt_state import optimizer_name
from zjax.sharding.paths import path_of, position_finder
from zjax.sharding.placement import unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule, make_update
from zjax.typing import Loss, Metrics, Params

BY_PARAMETER = ("master", "ema", "params")
"""Parts of the state that hold one array per parameter."""


class GroupedUpdate:
    """`update(state, grads, loss)` of `zjax.train.update`, in groups.

    Arrays go by their names in the program of the whole update; `state_names`,
    `grad_names` and `loss_names` are those of its inputs, in the order of the leaves,
    `state_inputs` and `grad_inputs` what each group reads of them, and `numbers` what
    the updates read besides. `positions` are the leaves of the state in each group,
    `shared` the outputs of none.

    Args:
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `optimizer` and `precision`.
        schedule: Learning rate by applied step, for the metrics.
        groups: Of each parameter, in the order of the leaves.
        grad_rows: Gradients as they arrive.
        jit: Compiles.

    Raises:
        PlanError: The optimizer cannot run group by group.
    """

    def __init__(
        self,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        *,
        groups: Sequence[int],
        grad_rows: Any,
        jit: Jit,
    ):
        passing = plan_on_device(plan)
        rows = state_rows(passing, config)
        loss = Loss(_number(), _number(), _arrays(plan.model_state), {})
        inputs = (_arrays(rows), _arrays(grad_rows), loss)
        update = _of_stored_gradients(tx, passing, config, schedule)
        program, outputs = trace(update, *inputs)
        group_of = _grouping(plan, groups)
        input_keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(inputs)]
        output_keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(outputs)]
        self.tree = jax.tree.structure(outputs)
        self.num_groups = max(groups) + 1
        input_groups = list(map(group_of, input_keys))
        self.input_groups = dict(zip(program.inputs, input_groups, strict=True))
        self.output_groups = [
            group_of(keys) if keys[0].idx == 0 else SHARED for keys in output_keys
        ]
        sizes = [len(jax.tree.leaves(part)) for part in inputs]
        names, ends = program.inputs, (sizes[0], sizes[0] + sizes[1])
        self.state_names = names[: ends[0]]
        self.grad_names = names[ends[0] : ends[1]]
        self.loss_names = names[ends[1] :]
        cut = cut_update(
            program,
            input_groups,
            self.output_groups,
            num_groups=self.num_groups,
            is_gradient=[name in self.grad_names for name in names],
            is_loss=[name in self.loss_names for name in names],
            optimizer=optimizer_name(tx),
            paths=[path_of(keys[1:]) for keys in output_keys],
        )
        self.meetings = cut.meetings
        self.shapes = program.shapes
        placed = [*jax.tree.leaves(rows), *jax.tree.leaves(grad_rows)]
        self.shapes.update(zip(names, (row.abstract for row in placed), strict=False))
        read = [{*part.inputs} for part in cut.updates]
        self.state_inputs = [
            [n for n in self.state_names if n in read[g] and self.group_of(n) == g]
            for g in range(self.num_groups)
        ]
        self.grad_inputs = [
            [n for n in self.grad_names if self.group_of(n) == g]
            for g in range(self.num_groups)
        ]
        arrays = set().union(*self.state_inputs, *self.grad_inputs)
        others = set().union(*read) - arrays
        self.numbers = [x for x in program.shapes if x in others]
        late = {*cut.meetings, *self.loss_names}
        self.waits = any(late & {*part.inputs} for part in cut.updates)
        self.measured = [part.outputs for part in cut.measures]
        self.measures = compile_parts(cut.measures, jit)
        self.shared = self.positions_of(SHARED)
        in_state = range(len(self.state_names))
        self.positions = [
            [i for i in self.positions_of(g) if i in in_state]
            for g in range(self.num_groups)
        ]
        places = dict(enumerate(row.stored for row in jax.tree.leaves(rows)))
        combined = [*map(places.get, self.shared), *([None] * len(cut.meetings))]
        (self.combine,) = compile_parts([cut.combine], jit, out_shardings=[combined])
        spent = {n for n in self.state_names if self.group_of(n) != SHARED}
        self.updates = compile_parts(
            cut.updates,
            jit,
            donated=frozenset(spent),
            out_shardings=[[places[i] for i in own] for own in self.positions],
        )

    def group_of(self, name: Name) -> int:
        """The group of an input."""
        return self.input_groups[name]

    def positions_of(self, group: int) -> list[int]:
        """Which outputs belong to a group."""
        return [i for i, own in enumerate(self.output_groups) if own == group]

    def abstract_calls(self) -> Iterator[tuple[Any, ...]]:
        """Each compiled update and operands to lower it with, once."""
        once = {id(part.run): part for part in self.updates}
        for part in once.values():
            operands = (self.shapes[name] for name in part.inputs)
            yield part.run, *operands, *part.scalars

    def rebuild(self, leaves: Mapping[int, Any]) -> tuple[TrainState, Metrics]:
        """The new state and the metrics, from all outputs by position."""
        ordered = [leaves[i] for i in range(len(self.output_groups))]
        return jax.tree.unflatten(self.tree, ordered)


def _of_stored_gradients(
    tx: Any, plan: Plan, config: Config, schedule: Schedule | None
) -> Callable[[TrainState, Params, Loss], tuple[TrainState, Metrics]]:
    update = make_update(tx, plan, config, schedule)

    def no_loss_function(params: Params) -> jax.Array:
        raise PlanError(
            Problem(
                "optimizer",
                optimizer_name(tx),
                "evaluates the loss within its update, when the parameters have gone",
                "set zero.optimizer_memory=device",
            )
        )

    def run(state: TrainState, grads: Params, loss: Loss) -> tuple[TrainState, Metrics]:
        grads = unpad_tree(grads, plan.grads)
        return update(state, grads, loss, no_loss_function)

    return run


def _grouping(plan: Plan, groups: Sequence[int]) -> Callable[[Any], int]:
    """Tells the group of a leaf of `(state, grads, loss)` or `(state, metrics)`."""
    position = position_finder(plan.master)
    trees = (*BY_PARAMETER, "opt_state")

    def group_of(keys: Any) -> int:
        part, *rest = keys
        if part.idx == 0 and rest[0].name in trees:
            found = position(rest[1:])
        else:
            found = position(rest) if part.idx == 1 else None
        return SHARED if found is None else groups[found]

    return group_of


def _arrays(rows: Any) -> Any:
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.stored_shape, row.stored_dtype), rows
    )


def _number() -> Any:
    return jax.ShapeDtypeStruct((), jnp.float32)
