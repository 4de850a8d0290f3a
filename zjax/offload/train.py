"""A step whose optimizer state rests on the host and passes through the devices.

The order of events follows from what the update reads. Where the update of a group
needs nothing but its own gradients, it runs as soon as these exist, under the rest of
the backward pass; where it needs a number of all gradients, as clipping does, the first
groups come up meanwhile and the updates follow. Either way the arithmetic is that of a
step without offload.

Reference: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.offload.groups import SHARED
from zjax.offload.parts import Jit
from zjax.offload.segments import Arrived, Segments
from zjax.offload.stream import Stream
from zjax.offload.update import GroupedUpdate
from zjax.offload.whole import Whole
from zjax.sharding.plan import Plan
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Loss, Metrics, Model


class OffloadedTrain:
    """`train(state, batch) -> (state, metrics)` with a streamed update.

    Args:
        model: Its stack, if it has one, is differentiated block by block.
        tx: Optax gradient transformation.
        plan: Some of its state rests on the host.
        config: Read for `seed`, `optimizer` and `precision`.
        num_microbatches: Gradient accumulation, 1 or more.
        schedule: Learning rate by applied step, for the metrics.
        jit: Compiles.

    Raises:
        PlanError: The optimizer cannot run group by group.
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
        kind = Segments if model.stack and model.takes_layers_apart else Whole
        self.seed = config.seed
        self.backward = kind(model, plan, num_microbatches, jit)
        self.update = GroupedUpdate(
            tx,
            plan,
            config,
            schedule,
            groups=self.backward.groups(),
            grad_rows=self.backward.grad_rows,
            jit=jit,
        )
        rows = jax.tree.leaves(state_rows(plan, config))
        self.positions = [
            self.update.positions(g) for g in range(self.update.num_groups)
        ]
        self.stream = Stream([[rows[i] for i in group] for group in self.positions])

    @property
    def order(self) -> list[int]:
        """The groups as they are updated."""
        arriving = self.backward.order
        # The next forward pass reads the embedding first and the head last.
        return arriving[::-1] if self.update.waits else arriving

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one step; the state is consumed.

        Args:
            state: Arrays placed by the plan.
            batch: Placed arrays.

        Returns:
            The next state and the metrics, both perhaps still being computed.
        """
        return _Running(self, state).step(state, batch)


class _Running:
    """One step: what is known of the update's program so far."""

    def __init__(self, train: OffloadedTrain, state: TrainState):
        self.train, self.update = train, train.update
        self.leaves = jax.tree.leaves(state)
        self.known = {
            name: x
            for name, x in zip(self.update.state_names, self.leaves, strict=True)
            if self.update.group_of(name) == SHARED
        }
        self.outputs: dict[int, Any] = {}
        self.stream = train.stream

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        train, update = self.train, self.update
        arriving = train.backward.run(state, batch, _key(train.seed, state.step))
        self.stream.begin(
            (group, [self.leaves[i] for i in train.positions[group]])
            for group in train.order
        )
        loss = self.receive(arriving)
        self.known |= zip(
            update.loss_names,
            jax.tree.leaves(loss._replace(metrics={})),
            strict=True,
        )
        self.combine()
        if update.waits:
            for group in train.order:
                self.run(group)
        new, metrics = update.rebuild(self.outputs)
        shown = {name: x.astype("float32") for name, x in loss.metrics.items()}
        return new, shown | metrics

    def receive(self, arriving: Iterator[Arrived | Loss]) -> Loss:
        for item in arriving:
            if isinstance(item, Loss):
                return item
            group, grads = item
            names = [
                n for n in self.update.grad_names if self.update.group_of(n) == group
            ]
            self.known |= zip(names, grads, strict=True)
            measured = self.update.measures[group](self.known)
            self.known |= zip(self.update.measured[group], measured, strict=True)
            if not self.update.waits:
                self.run(group)
        raise AssertionError("a backward pass ends with its loss")

    def combine(self) -> None:
        results = self.update.combine(self.known)
        shared = [i for i, g in enumerate(self.update.output_groups) if g == SHARED]
        self.outputs |= zip(shared, results[: len(shared)], strict=True)
        self.known |= zip(self.update.meetings, results[len(shared) :], strict=True)

    def run(self, group: int) -> None:
        positions = self.train.positions[group]
        for position, x in zip(positions, self.stream.take(group), strict=True):
            self.known[self.update.state_names[position]] = x
        results = self.update.updates[group](self.known)
        self.forget(group)
        resting = self.stream.put(group, results)
        self.outputs |= zip(positions, resting, strict=True)

    def forget(self, group: int) -> None:
        for name, owner in enumerate(self.update.input_groups):
            if owner == group:
                self.known.pop(name, None)


@functools.partial(jax.jit, static_argnums=0)
def _key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)
