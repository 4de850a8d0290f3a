"""The weights of a state as the model takes them, outside of a step."""

from typing import Any

import jax

from zjax.promotion import dtype_promotion
from zjax.sharding.placement import ArrayPlan, unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.program_plan import staged_plan
from zjax.storage.move import to_devices
from zjax.train.average import averaged, check_average, only_weights, parts_of
from zjax.train.compute_params import compute_params
from zjax.train.state import TrainState, check_not_consumed, stored_compute
from zjax.typing import Model, Params


class Weights:
    """Turns states into parameters; the programs for it compile once.

    Args:
        model: Model as pure functions.
        plan: Placement of every array.
    """

    def __init__(self, model: Model, plan: Plan):
        self._model, self._plan = model, plan
        on_device = staged_plan(plan)
        places = jax.tree.map(self._place, on_device.compute)

        def compute(state: TrainState) -> Params:
            weights = averaged(state, on_device)
            if weights is None:
                weights = unpad_tree(state.master, on_device.master)
            return compute_params(weights, on_device)

        def unpad(params: Params) -> Params:
            return unpad_tree(params, on_device.compute)

        self._compute = jax.jit(compute, out_shardings=places)
        self._unpad = jax.jit(unpad, out_shardings=places)

    def __call__(self, state: TrainState) -> Params:
        """Returns the averaged weights where the state holds them, else the current.

        Args:
            state: Any state of the run; not consumed.

        Returns:
            Arrays in the compute dtype and their logical shapes, placed as in a step.

        Raises:
            StateError: The state was consumed.
            PlanError: The averaged weights of the optimizer are offloaded.
        """
        check_not_consumed(state)
        check_average(state, self._plan)
        with dtype_promotion():
            if parts_of(state)[0] != "raw" or state.params == ():
                return self._compute(only_weights(state, self._plan))
            return self._unpad(
                jax.tree.map(
                    lambda x, row: to_devices(x, row, is_consumed=False),
                    stored_compute(state, self._plan),
                    self._plan.compute,
                )
            )

    def bind(self, state: TrainState) -> Any:
        """Returns the module with these weights, in evaluation mode."""
        return self._model.bind(self(state), state.model_state)

    def _place(self, row: ArrayPlan) -> jax.sharding.NamedSharding:
        return row.stored if row.shape == row.stored_shape else self._plan.replicated
