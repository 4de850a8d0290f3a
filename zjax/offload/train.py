"""A step whose optimizer state rests elsewhere and passes through the devices.

The order of events follows from what the update reads. Where the update of a group
needs nothing but its own gradients, it runs as soon as these exist, under the rest of
the backward pass; where it needs a number of all gradients, as clipping does, the first
groups come up meanwhile and the updates follow. Either way the arithmetic is that of a
step without offload. Only where updates are delayed does a gradient wait for the next
step, and is applied under its backward pass.

Reference: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.jaxprs.program import Name
from zjax.offload.inputs import input_at_rest, kept_here
from zjax.offload.parts import Jit
from zjax.offload.segments import Arrived, Segments
from zjax.offload.stream import Load, Stream
from zjax.offload.update import GroupedUpdate
from zjax.offload.whole import Whole
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, Plan, while_it_waits
from zjax.storage.array import DiskArray
from zjax.storage.move import rest
from zjax.storage.passing import room_to_pass
from zjax.train.gradients.partition import check_no_model_state
from zjax.train.master import whole_rows
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Loss, Metrics, Model

GROUP_BYTES = 300 << 20
"""Of master weights on one device, in a group of more than one array."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A gradient between the step that computed it and the one that applies it.

    Args:
        grads: For each group, in the order of its leaves and at rest.
        numbers: What updates read besides the arrays of their group.
    """

    grads: Sequence[Sequence[jax.Array | DiskArray]]
    numbers: list[jax.Array]


class OffloadedTrain:
    """`train(state, batch) -> (state, metrics)` with a streamed update.

    Args:
        model: Its stack, if it has one, is differentiated block by block.
        tx: Optax gradient transformation.
        plan: Some of its state rests on the host, or on disks.
        config: Read for `seed`, `zero`, `optimizer` and `precision`.
        num_microbatches: Gradient accumulation, 1 or more.
        schedule: Learning rate by applied step, for the metrics.
        jit: Compiles.

    Raises:
        PlanError: The optimizer cannot run group by group, or gains nothing by delay;
            or a stack would leave a model state as it starts.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        *,
        num_microbatches: int,
        schedule: Schedule | None,
        jit: Jit,
    ):
        self.seed, self.entries = config.seed, model.entries
        gradient_at_rest = functools.partial(
            while_it_waits, memory=config.zero.gradient_memory, config=config
        )
        if model.runs_by_block:
            where = config.zero.optimizer_memory
            check_no_model_state(plan, "zero.optimizer_memory", where, DEVICE)
            self.backward = Segments(
                model,
                plan,
                num_microbatches,
                jit,
                input_at_rest=functools.partial(
                    input_at_rest, plan=plan, config=config
                ),
                sum_at_rest=gradient_at_rest,
                keeps=kept_here(model, config),
            )
        else:
            self.backward = Whole(model, plan, num_microbatches, jit)
        groups = self.backward.groups()
        parts = bounded_groups(groups, jax.tree.leaves(whole_rows(plan.master)))
        self.update = GroupedUpdate(
            tx,
            plan,
            config,
            schedule,
            groups=parts,
            grad_rows=self.backward.grad_rows,
            jit=jit,
        )
        if config.zero.delay_updates_from >= 0 and not self.update.waits:
            raise PlanError(
                Problem(
                    "zero.delay_updates_from",
                    config.zero.delay_updates_from,
                    "gains nothing, as no update waits for all gradients",
                    "leave it at -1",
                )
            )
        self.parts = _parts_of(groups, parts)
        arriving = [part for group in self.backward.order for part in self.parts[group]]
        self.arriving = arriving
        self.delay_from = config.zero.delay_updates_from
        self.state_rows = state_rows(plan, config)
        rows = jax.tree.leaves(self.state_rows)
        self.rows = dict(zip(self.update.state_names, rows, strict=True))
        self.params = _params_of_groups(self.state_rows, self.update)
        away = {n for own in self.params for n in own if self.rows[n].memory != DEVICE}
        inputs = self.update.state_inputs
        self.away_inputs = [[n for n in own if n in away] for own in inputs]
        self.own_inputs = [[n for n in own if n not in away] for own in inputs]
        self.resting_grads = [
            gradient_at_rest(row) for row in jax.tree.leaves(self.backward.grad_rows)
        ]
        self.group_bytes = [
            sum(row.device_bytes for row in rows if row.memory != DEVICE)
            for rows in map(self.load_rows, range(self.update.num_groups))
        ]
        self.stream = Stream(room_to_pass(plan.mesh))
        self.known_forms: set[Any] = set()  # of batches that suit the model

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one step; the state is consumed.

        Args:
            state: Arrays placed by the plan.
            batch: Placed arrays.

        Returns:
            The next state and the metrics, both perhaps still being computed.
        """
        is_delayed = bool(state.pending) or 0 <= self.delay_from <= int(state.step)
        return _Running(self, state, is_delayed=is_delayed).step(state, batch)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a gradient that is pending.

        Args:
            state: Arrays placed by the plan; consumed.

        Returns:
            The state with nothing pending.
        """
        if not state.pending:
            return state
        return _Running(self, state, is_delayed=True).settle(state)

    def load_rows(self, group: int) -> list[ArrayPlan]:
        """Where the arrays rest that an update of a group takes with it."""
        names = self.update.state_inputs if self.update.waits else self.own_inputs
        rows = [self.rows[name] for name in names[group]]
        return rows + (self.grad_rows_of(group) if self.delay_from >= 0 else [])

    def grad_rows_of(self, group: int) -> list[ArrayPlan]:
        """Where the gradients of a group rest."""
        rows = dict(zip(self.update.grad_names, self.resting_grads, strict=True))
        return [rows[name] for name in self.update.grad_inputs[group]]


class _Running:
    """One step: what is known of the update's program so far.

    A delayed one reads the numbers of the step before where its updates run.
    """

    def __init__(self, train: OffloadedTrain, state: TrainState, *, is_delayed: bool):
        self.train, self.update, self.stream = train, train.update, train.stream
        self.is_delayed, self.pending = is_delayed, state.pending
        self.waits = self.update.waits and not is_delayed
        self.has_params = not self.waits
        leaves = jax.tree.leaves(dataclasses.replace(state, pending=()))
        self.known = dict(zip(self.update.state_names, leaves, strict=True))
        self.read = self.known
        if self.pending:
            pairs = zip(self.update.numbers, self.pending.numbers, strict=True)
            self.read = dict(pairs)
        # The next forward pass reads the embedding first and the head last.
        self.order = train.arriving[::-1] if self.waits else train.arriving
        self.outputs: dict[int, Any] = {}
        self.held: dict[int, list[jax.Array]] = {}
        self.grad_bytes_to_come = sum(row.device_bytes for row in train.resting_grads)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        train, update = self.train, self.update
        arriving = train.backward.run(state, batch, _key(train.seed, state.step))
        form = _form(batch)
        if form not in train.known_forms:
            # A batch that does not suit the model fails here, before anything moves.
            arriving = itertools.chain([next(arriving)], arriving)
            train.known_forms.add(form)
        self.begin()
        loss = self.receive(arriving)
        of_loss = jax.tree.leaves(loss._replace(metrics={}))
        self.known.update(zip(update.loss_names, of_loss, strict=True))
        self.combine()
        if self.waits:
            for group in self.order:
                self.run(group)
        new, metrics = update.rebuild(self.outputs)
        if self.is_delayed:
            grads = [self.held[group] for group in range(update.num_groups)]
            numbers = [self.known[name] for name in update.numbers]
            new = dataclasses.replace(new, pending=Pending(grads, numbers))
        shown = {name: x.astype("float32") for name, x in loss.metrics.items()}
        return new, shown | metrics

    def settle(self, state: TrainState) -> TrainState:
        self.has_params = False
        self.begin()
        for group in self.order:
            self.run(group)
        leaves, tree = jax.tree.flatten(dataclasses.replace(state, pending=()))
        return tree.unflatten(self.outputs.get(i, x) for i, x in enumerate(leaves))

    def begin(self) -> None:
        waits_for_next = self.is_delayed and not self.pending
        order = () if waits_for_next else self.order
        self.stream.begin(load for group in order for load in self.loads_of(group))

    def loads_of(self, group: int) -> Iterator[Load]:
        train = self.train
        if not self.has_params and train.away_inputs[group]:
            # The passes of the model read them, until the update replaces them.
            arrays, rows = self.at_rest(train.away_inputs[group])
            yield Load(("parameters", group), arrays, rows, is_consumed=False)
        names = train.own_inputs[group]
        arrays, rows = self.at_rest(names)
        for name in names:
            del self.known[name]
        if self.pending:
            arrays += self.pending.grads[group]
            rows += train.grad_rows_of(group)
        yield Load(group, arrays, rows, is_consumed=True)

    def at_rest(self, names: Sequence[Name]) -> tuple[list[Any], list[ArrayPlan]]:
        return [self.known[x] for x in names], [self.train.rows[x] for x in names]

    def receive(self, arriving: Iterator[Arrived | Loss]) -> Loss:
        for item in arriving:
            if isinstance(item, Loss):
                return item
            _, grads, params = item
            for group in self.train.parts[item.group]:
                size = len(self.update.grad_inputs[group])
                self.measure(group, grads[:size], params[:size])
                grads, params = grads[size:], params[size:]
        raise AssertionError("a backward pass ends with its loss")

    def measure(
        self, group: int, grads: list[jax.Array], params: Sequence[jax.Array]
    ) -> None:
        names = self.update.grad_inputs[group]
        self.known.update(zip(names, grads, strict=True))
        measured = self.update.measures[group](self.known)
        self.known.update(zip(self.update.measured[group], measured, strict=True))
        if self.waits:
            self.set_aside(group)
        elif self.is_delayed:
            self.hold(group, params)
        else:
            self.run(group, params)

    def set_aside(self, group: int) -> None:
        """Keeps gradients until a number of all of them is known."""
        names = self.update.grad_inputs[group]
        rows = self.train.grad_rows_of(group)
        if self.grad_bytes_to_come <= self.train.backward.kept_bytes:
            # What blocks have kept, and the pass gives up, leaves room.
            rows = [row.rest_in(DEVICE) for row in rows]
        self.grad_bytes_to_come -= sum(row.device_bytes for row in rows)
        self.stream.add(group, [self.known.pop(name) for name in names], rows)

    def combine(self) -> None:
        results = self.update.combine(self.known)
        shared = self.update.shared
        self.outputs.update(zip(shared, results[: len(shared)], strict=True))
        meetings = results[len(shared) :]
        self.known.update(zip(self.update.meetings, meetings, strict=True))

    def hold(self, group: int, params: Sequence[jax.Array]) -> None:
        """Keeps gradients for the next step, and applies those of the last."""
        grads = [self.known.pop(name) for name in self.update.grad_inputs[group]]
        if self.pending:
            self.run(group, params)
        else:
            names = self.update.state_names
            positions = self.update.positions[group]
            self.outputs.update((i, self.known[names[i]]) for i in positions)
        self.held[group] = self.stream.send(grads, self.train.grad_rows_of(group))

    def run(self, group: int, params: Sequence[jax.Array] = ()) -> None:
        train, update = self.train, self.update
        away = dict(zip(train.params[group], params, strict=False))
        num_bytes = 0
        if not self.has_params and train.away_inputs[group]:
            arrays, num_bytes = self.stream.take(("parameters", group))
            away = dict(zip(train.away_inputs[group], arrays, strict=True))
        arrays, more_bytes = self.stream.take(group)
        names = [*train.own_inputs[group], *update.grad_inputs[group]]
        positions = update.positions[group]
        replaced = [update.state_names[i] for i in positions]
        for name in {*replaced} - {*names}:
            self.known.pop(name).delete()  # nobody reads what the update replaces
        self.read.update(zip(names, arrays, strict=False))
        self.read.update((name, away[name]) for name in train.away_inputs[group])
        results = update.updates[group](self.read)
        for name in (*names, *train.away_inputs[group]):
            self.read.pop(name).delete()
        resting = rest(results, [train.rows[name] for name in replaced])
        self.stream.leave(num_bytes + more_bytes, resting)
        self.outputs.update(zip(positions, resting, strict=True))


def bounded_groups(groups: Sequence[int], rows: Sequence[ArrayPlan]) -> list[int]:
    """Cuts groups into smaller ones of bounded bytes.

    Args:
        groups: Of each parameter.
        rows: Master weights.

    Returns:
        The new group of each parameter, numbered so that those of a group follow one
        another.
    """
    found = [0] * len(groups)
    number = -1
    for group in range(max(groups) + 1):
        filled = math.inf
        for i, own in enumerate(groups):
            if own != group:
                continue
            if filled + rows[i].device_bytes > GROUP_BYTES:
                number, filled = number + 1, 0
            found[i], filled = number, filled + rows[i].device_bytes
    return found


def _parts_of(groups: Sequence[int], parts: Sequence[int]) -> list[list[int]]:
    pairs = sorted(set(zip(groups, parts, strict=True)))
    return [[p for g, p in pairs if g == group] for group in range(max(groups) + 1)]


def _params_of_groups(rows: TrainState, update: GroupedUpdate) -> list[list[Name]]:
    """The parameters in use of each group, in the order of its leaves."""
    found: list[list[Name]] = [[] for _ in range(update.num_groups)]
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    for name, (keys, _) in zip(update.state_names, leaves, strict=True):
        if keys[0].name == "params":
            found[update.group_of(name)].append(name)
    return found


def _form(batch: Batch) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((x.shape, x.dtype) for x in leaves)


@functools.partial(jax.jit, static_argnums=0)
def _key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
