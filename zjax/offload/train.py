"""A step with optimizer state that is stored elsewhere and streams through devices.

The arrays that an update reads decide when it runs. If the update of a group reads only
the group's gradients, it runs as soon as these exist, while the backward pass
continues. If it needs the global gradient norm, as clipping does, the first groups are
prefetched during the pass and all updates follow the pass. Either way the arithmetic
equals a step without offload. Only delayed updates apply a gradient one step late,
during the next backward pass.

Reference: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zjax.errors import PlanError, Problem
from zjax.jaxprs.program import Name
from zjax.offload.blockwise import BlockwiseBackward
from zjax.offload.compiled import Jit, Peak, UnreportedMemoryError, added_bytes
from zjax.offload.gradients import Backward, GroupGradients, WholeBackward
from zjax.offload.groups import by_group
from zjax.offload.stream import WRITE_BACK_SHARE, Load, Stream, moved_bytes
from zjax.offload.update import GroupedUpdate, GroupUpdate
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.memory import bytes_by_memory, stored_bytes, tree_bytes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan, offload_pending, staged_plan, trained_plan
from zjax.sharding.roles import joined, trained
from zjax.storage.array import DiskArray
from zjax.storage.move import store
from zjax.storage.transfers import transfer_budget
from zjax.train.compute_params import unsplit_plans
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Loss, Metrics, Model, StepBatch

GROUP_BYTES = 300 << 20
"""Most bytes of master weights on one device in a group of several arrays."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A gradient between the step that computed it and the next step, which applies it.

    Args:
        grads: Stored gradients of each group, by leaf.
        numbers: Shared scalars that updates read besides the arrays of a group.
    """

    grads: Sequence[Sequence[jax.Array | DiskArray]]
    numbers: list[jax.Array]


class _Group(NamedTuple):
    """Arrays that the update of one group moves, by name.

    Args:
        update: Programs of the group, with the names of arrays that each reads.
        params: Offloaded compute parameters of the group, which the passes read, too.
        state: All other arrays of the state that the update reads.
        replaced: Arrays that the update computes anew.
        grad_rows: Plans of the stored gradients.
    """

    update: GroupUpdate
    params: list[Name]
    state: list[Name]
    replaced: list[Name]
    grad_rows: list[ArrayPlan]


class OffloadedTrain:
    """`train(state, batch) -> (state, metrics)` with a streamed update.

    Args:
        model: Model; a stack, if there is one, is differentiated block by block.
        tx: Optax gradient transformation.
        plan: Plan that stores some of the state on the host or on disks.
        config: Config; reads `seed`, `model`, `zero`, `optimizer` and `precision`.
        schedule: Learning rate by applied step, for the metrics.
        jit: `jax.jit` with compiler options.

    Raises:
        PlanError: The optimizer cannot run group by group, or gains nothing by delay;
            or the model has a state, which no stack updates.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        *,
        jit: Jit,
    ):
        self.seed, self.plan = config.seed, plan
        num_microbatches = resolve_batch(config, plan.num_batch_shares).num_microbatches
        self.num_microbatches = num_microbatches
        self.backward: Backward = (
            BlockwiseBackward(
                model, plan, config.zero, config.model, num_microbatches, jit
            )
            if model.runs_by_block
            else WholeBackward(model, plan, num_microbatches, jit)
        )
        groups, learned = self.backward.groups, trained_plan(plan)
        masters = jax.tree.leaves(unsplit_plans(learned.master))
        smaller = bounded_groups(groups, masters)
        self.update = GroupedUpdate(
            tx,
            learned,
            state_rows(staged_plan(learned), config.precision),
            config.optimizer,
            config.precision,
            schedule,
            model.stack,
            groups=smaller,
            grad_rows=self.backward.grad_rows,
            jit=jit,
        )
        self.delay_from = config.zero.placement.delay_updates_from
        if self.delay_from >= 0 and not self.update.waits:
            problem = "gains nothing, as no update waits for all gradients"
            field, remedy = "zero.offload.delay_updates_from", "leave it at -1"
            raise PlanError(Problem(field, self.delay_from, problem, remedy))
        # A group of the pass may hold several groups of the update, never the reverse.
        pairs = sorted(set(zip(smaller, groups, strict=True)))
        self.updates_of = by_group(pairs, len(self.backward.order))
        self.arriving = [
            n for group in self.backward.order for n in self.updates_of[group]
        ]
        self.state_rows = state_rows(plan, config.precision)
        rows = jax.tree.leaves(state_rows(learned, config.precision))
        self.rows = dict(zip(self.update.state_names, rows, strict=True))
        memory = config.zero.placement.gradient_memory
        self.stored_grads = [
            offload_pending(row, memory, config.zero.placement.nvme_paths)
            for row in jax.tree.leaves(self.backward.grad_rows)
        ]
        self.groups = [*map(self._group, self.update.groups)]
        self.group_bytes = [*map(self._moved_bytes, self.groups)]
        self.stream = Stream(transfer_budget(plan.mesh))
        self.known_forms: set[Any] = set()  # of batches that suit the model

    def _group(self, update: GroupUpdate) -> _Group:
        """Lists the arrays that the update of one group moves."""
        offloaded = {n for n in update.params if not self.rows[n].is_on_device}
        grad_rows = dict(zip(self.update.grad_names, self.stored_grads, strict=True))
        return _Group(
            update,
            params=[name for name in update.state if name in offloaded],
            state=[name for name in update.state if name not in offloaded],
            replaced=[self.update.state_names[i] for i in update.positions],
            grad_rows=[grad_rows[name] for name in update.grads],
        )

    def _moved_bytes(self, group: _Group) -> int:
        """Counts the bytes that the update of a group moves to one device."""
        names = group.update.state if self.update.waits else group.state
        grads = group.grad_rows if self.delay_from >= 0 else []
        return moved_bytes([*(self.rows[name] for name in names), *grads])

    def __call__(
        self, state: TrainState, batch: Batch | StepBatch
    ) -> tuple[TrainState, Metrics]:
        """Takes one step; the state is consumed. Results may still be computed."""
        number = int(state.step) + 1
        is_delayed = bool(state.pending) or 0 <= self.delay_from <= number
        return _Running(self, state, is_delayed=is_delayed).step(state, batch)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient; the state is consumed."""
        if not state.pending:
            return state
        return _Running(self, state, is_delayed=True).settle(state)

    def predict_peak(self, batch: Batch | StepBatch) -> Peak | None:
        """Predicts the moment of a step with most memory, from compiled programs.

        None if the compiler does not report memory. Only shapes and dtypes of the batch
        are read.
        """
        try:
            added = [added_bytes(*call) for call in self.update.abstract_calls()]
            moments = self.backward.moments(
                self.state_rows, StepBatch.of(batch), self.waiting_bytes
            )
        except UnreportedMemoryError:
            return None
        always = {
            "stored state": stored_bytes(self.plan).device,
            "groups in transfer": self.stream.most_bytes(self.group_bytes),
            "pending gradients": self.pending_bytes(),
        }
        peaks = [Peak(each.moment, always | each.parts) for each in moments]
        peaks[-1].parts["program"] = max(added)  # the last peak is the update
        return max(peaks, key=lambda peak: peak.total)

    def pending_bytes(self) -> int:
        """Counts the bytes per device of delayed gradients while new ones arrive."""
        if self.delay_from < 0:
            return 0
        written = min(
            moved_bytes(self.stored_grads), self.stream.limit // WRITE_BACK_SHARE
        )
        return bytes_by_memory(self.stored_grads).device + written

    def waiting_bytes(self, residual_bytes: int) -> int:
        """Counts the gradients on a device that wait for the global norm, in bytes.

        Gradients replace residuals as the backward pass releases residuals.
        """
        if not self.update.waits or self.delay_from >= 0:
            return 0
        everything = tree_bytes(self.backward.grad_rows)
        if moved_bytes(self.stored_grads) == 0:
            return 0 if self.num_microbatches > 1 else everything  # sums wait in place
        written = self.stream.limit // WRITE_BACK_SHARE
        moving = self.stream.most_bytes(self.group_bytes)
        beside_state = everything * moving // max(1, sum(self.group_bytes))
        return min(everything, residual_bytes + written + beside_state)


class _Running:
    """One step.

    `known` are arrays of this step by name, `read` the arrays that updates read: a
    delayed update reads the shared numbers of the step before.
    """

    def __init__(self, train: OffloadedTrain, state: TrainState, *, is_delayed: bool):
        self.train, self.update, self.stream = train, train.update, train.stream
        self.is_delayed, self.pending = is_delayed, state.pending
        self.waits = self.update.waits and not is_delayed
        self.has_params = not self.waits  # the pass hands them over with gradients
        leaves = jax.tree.leaves(self.changed(state))
        self.known = dict(zip(self.update.state_names, leaves, strict=True))
        self.read = self.known
        if self.pending:
            pairs = zip(self.update.numbers, self.pending.numbers, strict=True)
            self.read = dict(pairs)
        # The next forward pass reads the embedding first and the head last.
        self.order = train.arriving[::-1] if self.waits else train.arriving
        self.outputs: dict[int, Any] = {}
        self.delayed_grads: dict[int, list[jax.Array]] = {}
        self.grad_bytes_to_come = tree_bytes(train.stored_grads)

    def step(
        self, state: TrainState, batch: Batch | StepBatch
    ) -> tuple[TrainState, Metrics]:
        """Takes the step: differentiates, then updates, stores or delays each group."""
        train, update = self.train, self.update
        key = _key(train.seed, state.step)
        arriving = train.backward.run(state, StepBatch.of(batch), key)
        form = _form(batch)
        if form not in train.known_forms:
            # A batch that does not suit the model fails here, before anything moves.
            arriving = itertools.chain([next(arriving)], arriving)
            train.known_forms.add(form)
        self.prefetch()
        loss = self.receive(arriving)
        # The update was traced without the model's metrics.
        loss_leaves = jax.tree.leaves(loss._replace(metrics={}))
        self.known.update(zip(update.loss_names, loss_leaves, strict=True))
        self.combine()
        if self.waits:
            for number in self.order:
                self.run_update(number)
        new, metrics = update.rebuild(self.outputs)
        if self.is_delayed:
            grads = [self.delayed_grads[number] for number in range(len(train.groups))]
            numbers = [self.known[name] for name in update.numbers]
            new = dataclasses.replace(new, pending=Pending(grads, numbers))
        new = self.with_frozen(new, state)
        shown = {name: x.astype("float32") for name, x in loss.metrics.items()}
        return new, shown | metrics

    def settle(self, state: TrainState) -> TrainState:
        """Applies the pending gradient without a backward pass."""
        # No pass hands parameters over here.
        self.has_params = False
        self.prefetch()
        for number in self.order:
            self.run_update(number)
        leaves, tree = jax.tree.flatten(self.changed(state))
        new = tree.unflatten(self.outputs.get(i, x) for i, x in enumerate(leaves))
        return self.with_frozen(new, state)

    def changed(self, state: TrainState) -> TrainState:
        """Returns the arrays of a state that an update may change."""
        master = trained(state.master, self.train.plan.master)
        return dataclasses.replace(state, master=master, pending=())

    def with_frozen(self, new: TrainState, state: TrainState) -> TrainState:
        """Returns the new state with the frozen parameters of the old state."""
        master = joined(new.master, state.master, self.train.plan.master)
        return dataclasses.replace(new, master=master)

    def prefetch(self) -> None:
        """Starts to prefetch the groups in order of update."""
        # The first delayed step has no gradient to apply, and no update to prefetch
        # for.
        waits_for_next = self.is_delayed and not self.pending
        order = () if waits_for_next else self.order
        self.stream.prefetch(load for number in order for load in self.loads_of(number))

    def loads_of(self, number: int) -> Iterator[Load]:
        """Yields the loads of a group: parameters, then state and pending gradients."""
        group = self.train.groups[number]
        if not self.has_params and group.params:
            # The model's passes read them until the update replaces them.
            arrays, rows = self.stored(group.params)
            yield Load(("parameters", number), arrays, rows, is_consumed=False)
        arrays, rows = self.stored(group.state)
        for name in group.state:
            # The load consumes the stored array: nothing may read it from here on.
            del self.known[name]
        if self.pending:
            arrays += self.pending.grads[number]
            rows += group.grad_rows
        yield Load(number, arrays, rows, is_consumed=True)

    def stored(self, names: Sequence[Name]) -> tuple[list[Any], list[ArrayPlan]]:
        """Returns arrays and plans by name."""
        return [self.known[x] for x in names], [self.train.rows[x] for x in names]

    def receive(self, arriving: Iterator[GroupGradients | Loss]) -> Loss:
        """Measures gradients, and updates, stores or delays each group on arrival."""
        for item in arriving:
            if isinstance(item, Loss):
                return item
            _, grads, params = item
            for number in self.train.updates_of[item.group]:
                size = len(self.train.groups[number].update.grads)
                # Groups of the update split the leaves of a group in order.
                self.receive_group(number, grads[:size], params[:size])
                grads, params = grads[size:], params[size:]
        raise AssertionError("a backward pass ends with its loss")

    def receive_group(
        self, number: int, grads: list[jax.Array], params: Sequence[jax.Array]
    ) -> None:
        """Measures one group, then updates, stores or delays it."""
        update = self.train.groups[number].update
        self.known.update(zip(update.grads, grads, strict=True))
        measured = update.measure(self.known)
        self.known.update(zip(update.measured, measured, strict=True))
        if self.waits:
            self.await_norm(number)
        elif self.is_delayed:
            self.delay(number, params)
        else:
            self.run_update(number, params)

    def await_norm(self, number: int) -> None:
        """Stores gradients until the global norm is known."""
        group = self.train.groups[number]
        rows = group.grad_rows
        if self.grad_bytes_to_come <= self.train.backward.residual_bytes:
            # Keep them on the device: they fit into the bytes of released residuals.
            rows = [row.on_device for row in rows]
        self.grad_bytes_to_come -= tree_bytes(rows)
        grads = [self.known.pop(name) for name in group.update.grads]
        self.stream.add(number, grads, rows)

    def combine(self) -> None:
        """Computes the shared arrays, and the numbers that updates read."""
        results = self.update.combine(self.known)
        shared = self.update.shared
        self.outputs.update(zip(shared, results[: len(shared)], strict=True))
        numbers = results[len(shared) :]
        self.known.update(zip(self.update.global_numbers, numbers, strict=True))

    def delay(self, number: int, params: Sequence[jax.Array]) -> None:
        """Stores gradients for the next step, and applies the pending gradients."""
        group = self.train.groups[number]
        grads = [self.known.pop(name) for name in group.update.grads]
        if self.pending:
            self.run_update(number, params)
        else:
            pairs = zip(group.update.positions, group.replaced, strict=True)
            self.outputs.update((i, self.known[name]) for i, name in pairs)
        self.delayed_grads[number] = self.stream.write_back(grads, group.grad_rows)

    def run_update(self, number: int, params: Sequence[jax.Array] = ()) -> None:
        """Updates one group, and stores the new arrays."""
        group = self.train.groups[number]
        # Not strict: `params` is empty unless the pass handed parameters over.
        staged = dict(zip(group.update.params, params, strict=False))
        num_bytes = 0
        if not self.has_params and group.params:
            arrays, num_bytes = self.stream.wait(("parameters", number))
            staged = dict(zip(group.params, arrays, strict=True))
        arrays, more_bytes = self.stream.wait(number)
        names = [*group.state, *group.update.grads]
        for name in {*group.replaced} - {*names}:
            self.known.pop(
                name
            ).delete()  # the update replaces it and no program reads it
        # Not strict: gradients are in the load only if they were stored.
        self.read.update(zip(names, arrays, strict=False))
        self.read.update((name, staged[name]) for name in group.params)
        results = group.update.update(self.read)
        # Frees the operands that were not donated, such as gradients.
        for name in (*names, *group.params):
            self.read.pop(name).delete()
        stored = store(results, [self.train.rows[name] for name in group.replaced])
        self.stream.release(num_bytes + more_bytes, stored)
        self.outputs.update(zip(group.update.positions, stored, strict=True))


def bounded_groups(groups: Sequence[int], rows: Sequence[ArrayPlan]) -> list[int]:
    """Splits the group of each parameter into consecutive groups of bounded bytes.

    `rows` are the plans of the master weights.
    """
    bounded = [0] * len(groups)
    number = -1
    for group in range(max(groups) + 1):
        # Starts a new group at the first leaf.
        filled = math.inf
        for i, group_of_i in enumerate(groups):
            if group_of_i != group:
                continue
            if filled + rows[i].device_bytes > GROUP_BYTES:
                number, filled = number + 1, 0
            bounded[i], filled = number, filled + rows[i].device_bytes
    return bounded


def _form(batch: Batch | StepBatch) -> Any:
    """Returns the structure, shapes and dtypes of a batch."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((x.shape, x.dtype) for x in leaves)


@functools.partial(jax.jit, static_argnums=0)
def _key(seed: int, step: jax.Array) -> jax.Array:
    """Returns the random key of a step, as `Programs.step_key` does."""
    return jax.random.fold_in(jax.random.key(seed), step)
