"""Gradients that leave the devices: backward passes by group, block inputs and sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zjax.offload.compiled import Jit, Peak, added_bytes, like_batch
from zjax.offload.groups import by_group
from zjax.offload.stream import Load, Stream
from zjax.settings.schema import Model as Shape
from zjax.settings.schema import Zero
from zjax.sharding.memory import tree_bytes
from zjax.sharding.placement import (
    ArrayPlan,
    abstract_key,
    abstract_tree,
    pad_tree,
    place_tree,
    shardings,
    unpad_tree,
)
from zjax.sharding.plan import Plan, offload_pending
from zjax.storage.move import store
from zjax.train import microbatches
from zjax.train.gradients import AutomaticGradients
from zjax.train.state import TrainState, stored_compute, without_update
from zjax.train.update import loss_scale_of
from zjax.typing import Loss, Model, Params, StepBatch


class GroupGradients(NamedTuple):
    """The gradients of one group of parameters.

    Args:
        group: Index of the group.
        grads: Gradients in the order of the group's leaves.
        params: Parameters of the group on the devices, valid until the next group is
            requested; empty if the pass did not copy parameters.
    """

    group: int
    grads: list[jax.Array]
    params: Sequence[jax.Array] = ()


class Backward(Protocol):
    """Gradients of the mean loss over a batch, by group.

    Args:
        grad_rows: Plans of the gradients that `run` yields.
        groups: Group of each leaf of the parameters that are trained.
        order: Groups in order of arrival; some groups may be empty.
        residual_bytes: Bytes of residuals that the last pass saved on each device.
    """

    grad_rows: Any
    groups: list[int]
    order: list[int]
    residual_bytes: int

    def run(
        self, state: TrainState, step: StepBatch, key: jax.Array
    ) -> Iterator[GroupGradients | Loss]:
        """Yields gradients in `order`, sharded as they are stored, then the loss."""
        ...

    def moments(self, state: TrainState, step: StepBatch, pending: Any) -> list[Peak]:
        """Predicts the bytes on a device while each program runs, `update` last.

        `pending` is a function from bytes of residuals to bytes of gradients that wait
        on the device for the update; `state` holds plans of arrays.
        """
        ...


class WholeBackward:
    """One program for all gradients, of models that are not a line of blocks.

    As a stack of one block the model would be seven programs that round differently,
    and could have no state.
    """

    def __init__(self, model: Model, plan: Plan, num_microbatches: int, jit: Jit):
        self.plan, self.entries = plan, model.entries
        self.grad_rows = plan.grads
        self.groups = [0] * len(jax.tree.leaves(plan.grads))
        self.order = [0]
        self.residual_bytes = 0
        automatic = AutomaticGradients(model, plan, num_microbatches)

        def stored_gradients(state: TrainState, step: StepBatch, key: jax.Array) -> Any:
            params = unpad_tree(stored_compute(state, plan), plan.compute)
            scale = loss_scale_of(state)
            grads, loss = automatic.gradients(
                params, state.model_state, step, key, scale
            )
            stored = pad_tree(place_tree(grads, plan.grads), plan.grads)
            return stored, loss.model_state, loss._replace(model_state=())

        places = (shardings(plan.grads), shardings(plan.model_state), None)
        self.gradients = jit(stored_gradients, out_shardings=places)

    def run(
        self, state: TrainState, step: StepBatch, key: jax.Array
    ) -> Iterator[GroupGradients | Loss]:
        """Yields all gradients as one group, then the loss; see `Backward`."""
        # Arrays that only the update reads are not on the devices.
        grads, model_state, loss = self.gradients(
            without_update(state, self.plan), step, key
        )
        yield GroupGradients(0, jax.tree.leaves(grads))
        yield loss._replace(model_state=model_state)

    def moments(self, state: TrainState, step: StepBatch, pending: Any) -> list[Peak]:
        """Predicts the bytes of the gradient program and the update; see `Backward`."""
        state = without_update(abstract_tree(state), self.plan)
        step = step._replace(batch=like_batch(self.plan, step.batch, self.entries))
        program = added_bytes(self.gradients, state, step, abstract_key())
        grads = {"gradients": tree_bytes(self.grad_rows)}
        return [Peak("gradients", {"program": program}), Peak("update", grads)]


class GradientSums:
    """Adds gradients up group by group, weighted by the weights of microbatches.

    `groups` has the group of each gradient, 0 to num_groups - 1, and `grad_rows` the
    plan of each gradient on the devices.
    """

    def __init__(
        self,
        groups: Sequence[int],
        grad_rows: Any,
        settings: Zero,
        num_microbatches: int,
        *,
        num_groups: int,
        limit_bytes: int,
        jit: Jit,
    ):
        self.num_microbatches = num_microbatches
        self.stream = Stream(limit_bytes)
        memory, disks = (
            settings.placement.gradient_memory,
            settings.placement.nvme_paths,
        )
        rows = [offload_pending(x, memory, disks) for x in jax.tree.leaves(grad_rows)]
        pairs = zip(rows, groups, strict=True)
        self.rows: list[list[ArrayPlan]] = by_group(pairs, num_groups)
        self._scale = jit(_scaled)
        self._add = jit(_add, donate_argnums=0)
        self._mean = jit(_mean, donate_argnums=0)
        self.mean_loss = jit(_mean_loss)

    def add(
        self,
        sums: dict[int, list[Any]],
        arriving: Iterator[GroupGradients],
        weights: list[jax.Array],
    ) -> Iterator[GroupGradients]:
        """Adds the gradients of a microbatch; in the last microbatch, yields the means.

        `sums` are the stored sums so far by group, in the order of arrival, and
        `weights` the weights of all microbatches so far.
        """
        is_first, is_last = not sums, len(weights) == self.num_microbatches
        self.stream.prefetch(
            Load(group, sums.pop(group), self.rows[group], is_consumed=True)
            # A list, as the generator pops from `sums` while it iterates.
            for group in list(sums)
        )
        for group, grads, params in arriving:
            # The first microbatch needs no sum to be loaded.
            if is_first:
                sums[group] = store(self._scale(grads, weights[0]), self.rows[group])
                continue
            total, num_bytes = self.stream.wait(group)
            total = self._add(total, grads, weights[-1])
            if is_last:
                total = self._mean(total, weights)
            else:
                sums[group] = total = store(total, self.rows[group])
            self.stream.release(num_bytes, total)
            if is_last:
                yield GroupGradients(group, total, params)


def _scaled(grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(lambda g: microbatches.scaled(g, weight), grads)


def _add(total: Params, grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(jnp.add, total, _scaled(grads, weight))


def _mean(total: Params, weights: list[jax.Array]) -> Params:
    whole = sum(weights)
    return _scaled(total, 1 / jnp.where(whole == 0, 1, whole))


def _mean_loss(losses: list[Loss]) -> Loss:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *losses)
    return microbatches.mean_loss(stacked, ())


def saving_policy(model: Model, shape: Shape) -> Callable[..., Any] | None:
    """Returns the policy of `jax.checkpoint` for residuals that stay on devices.

    None if a block saves the block's input alone, which may be offloaded.
    """
    return None if shape.offloads_inputs or shape.remat == "full" else model.keeps


def input_plan(
    x: jax.Array | jax.ShapeDtypeStruct,
    plan: Plan,
    memory: str,
    disks: tuple[str, ...],
) -> ArrayPlan:
    """Plans an input of a block, sharded like a batch, until the backward pass."""
    place = plan.batch_sharding(x)
    row = ArrayPlan("an input of a block", x.shape, x.dtype, place, place)
    return offload_pending(row, memory, disks)
