"""Backward passes that hand over gradients group by group."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from zjax.offload.compiled import Jit
from zjax.offload.peak import Peak, added_bytes, like_batch
from zjax.sharding.memory import tree_bytes
from zjax.sharding.placement import (
    abstract_key,
    abstract_tree,
    pad_tree,
    place_tree,
    shardings,
    unpad_tree,
)
from zjax.sharding.plan import Plan
from zjax.train.gradients.automatic import AutomaticGradients
from zjax.train.state import TrainState, stored_compute, without_update
from zjax.train.update import loss_scale_of
from zjax.typing import Batch, Loss, Model


class GroupGradients(NamedTuple):
    """The gradients of one group of parameters.

    Args:
        group: Index of the group.
        grads: In the order of the group's leaves.
        params: Parameters of the group on the devices, valid until the next group is
            requested; empty if the pass did not copy them.
    """

    group: int
    grads: list[jax.Array]
    params: Sequence[jax.Array] = ()


class Backward(Protocol):
    """Gradients of the mean loss over a batch, by group.

    Args:
        grad_rows: Plans of the gradients that `run` yields.
        groups: Group of each leaf of the parameters that are trained.
        order: Groups in the order in which their gradients arrive; some may be empty.
        residual_bytes: Bytes per device of residuals that the last pass saved there.
    """

    grad_rows: Any
    groups: list[int]
    order: list[int]
    residual_bytes: int

    def run(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> Iterator[GroupGradients | Loss]:
        """Yields gradients in `order`, sharded as they are stored, then the loss."""
        ...

    def moments(self, state: TrainState, batch: Batch, pending: Any) -> list[Peak]:
        """Bytes that a device holds while each program runs; the last is `update`.

        `pending` is a function from bytes of residuals to bytes of the gradients that
        wait on the device for the update; `state` holds plans of arrays.
        """
        ...


class WholeBackward:
    """One program for all gradients, of models that are not a line of blocks."""

    def __init__(self, model: Model, plan: Plan, num_microbatches: int, jit: Jit):
        self.plan, self.entries = plan, model.entries
        self.grad_rows = plan.grads
        self.groups = [0] * len(jax.tree.leaves(plan.grads))
        self.order = [0]
        self.residual_bytes = 0
        automatic = AutomaticGradients(model, plan, num_microbatches)

        def stored_gradients(state: TrainState, batch: Batch, key: jax.Array) -> Any:
            params = unpad_tree(stored_compute(state, plan), plan.compute)
            scale = loss_scale_of(state)
            grads, loss = automatic.gradients(
                params, state.model_state, batch, key, scale
            )
            stored = pad_tree(place_tree(grads, plan.grads), plan.grads)
            return stored, loss.model_state, loss._replace(model_state=())

        places = (shardings(plan.grads), shardings(plan.model_state), None)
        self.gradients = jit(stored_gradients, out_shardings=places)

    def run(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> Iterator[GroupGradients | Loss]:
        """See `Backward`."""
        grads, model_state, loss = self.gradients(
            without_update(state, self.plan), batch, key
        )
        yield GroupGradients(0, jax.tree.leaves(grads))
        yield loss._replace(model_state=model_state)

    def moments(self, state: TrainState, batch: Batch, pending: Any) -> list[Peak]:
        """See `Backward`."""
        state = without_update(abstract_tree(state), self.plan)
        batch = like_batch(self.plan, batch, self.entries)
        program = added_bytes(self.gradients, state, batch, abstract_key())
        grads = {"gradients": tree_bytes(self.grad_rows)}
        return [Peak("gradients", {"program": program}), Peak("update", grads)]
