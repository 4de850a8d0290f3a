"""A backward pass as one program, for models that are not a line of blocks."""

from collections.abc import Iterator
from typing import Any

import jax

from zjax.offload.parts import Jit
from zjax.offload.segments import Arrived
from zjax.sharding.placement import pad_tree, place_tree, shardings, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.gradients.automatic import AutomaticGradients
from zjax.train.state import TrainState, without_update
from zjax.train.update import loss_scale_of
from zjax.typing import Batch, Loss, Model


class Whole:
    """The gradients of a model, all at once: its parameters are one group.

    Args:
        model: Its loss.
        plan: Places parameters and gradients.
        num_microbatches: Parts of the batch that follow one another.
        jit: Compiles.
    """

    def __init__(self, model: Model, plan: Plan, num_microbatches: int, jit: Jit):
        self.plan = plan
        self.grad_rows = plan.grads
        self.kept_bytes = 0
        automatic = AutomaticGradients(model, plan, num_microbatches)

        def stored_gradients(state: TrainState, batch: Batch, key: jax.Array) -> Any:
            params = unpad_tree(state.params, plan.compute)
            scale = loss_scale_of(state)
            grads, loss = automatic.gradients(
                params, state.model_state, batch, key, scale
            )
            stored = pad_tree(place_tree(grads, plan.grads), plan.grads)
            return stored, loss.model_state, loss._replace(model_state=())

        places = (shardings(plan.grads), shardings(plan.model_state), None)
        self.gradients = jit(stored_gradients, out_shardings=places)

    @property
    def order(self) -> list[int]:
        """The groups as their gradients arrive."""
        return [0]

    def groups(self) -> list[int]:
        """The group of each leaf of the parameters, in their order."""
        return [0] * len(jax.tree.leaves(self.plan.master))

    def run(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> Iterator[Arrived | Loss]:
        """Differentiates the mean loss over a batch; see `Segments.run`."""
        grads, model_state, loss = self.gradients(without_update(state), batch, key)
        yield Arrived(0, jax.tree.leaves(grads))
        yield loss._replace(model_state=model_state)
