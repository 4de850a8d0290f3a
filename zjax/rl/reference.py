"""The reference policy, which does not learn: frozen weights, or a model's own base."""

import jax
from jaxtyping import Array, Float

from zjax.config.rl_rules import base_problems
from zjax.errors import ConfigError
from zjax.ops.remat import Memory
from zjax.rl.ranges import check_above_zero
from zjax.run.build import Run
from zjax.sharding.memory import tree_bytes
from zjax.storage.move import store, to_devices
from zjax.train.state import TrainState
from zjax.typing import Batch


class Reference:
    """The policy at the start of training, for divergences from it.

    With adapters (`lora`) it is the frozen matrices of the policy itself, and stores
    nothing. Else it is a copy of the weights in the compute dtype.

    Args:
        run: Run of the policy.
        state: State whose weights are copied; not consumed. On a resumed run this is
            the first state, not the restored one.
        memory: Memory that stores the copy between passes, `device` or `pinned_host`; a
            pass brings it to the devices.

    Attributes:
        num_bytes: Bytes of the copy on one device, or for one device on the host; 0
            with adapters.

    Raises:
        ConfigError: Adapters of DoRA, or beside parameters that are trained in full:
            the frozen matrices alone are then not the policy at the start.
        ModelError: The model does not know log-probabilities of targets.
        StateError: The state was consumed before.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        *,
        memory: Memory = "device",
    ):
        self._run, self.num_bytes = run, 0
        self._is_base = run.config.lora is not None
        if run.config.lora:
            if problems := [*base_problems(run.config.lora)]:
                raise ConfigError(*problems)
            return
        self._rows = jax.tree.map(lambda x: x.stored_in(memory), run.plan.compute)
        self._params = store(run.token_scores.copy(state), self._rows)
        on_device = jax.tree.map(lambda row: row.on_device, self._rows)
        self.num_bytes = tree_bytes(on_device)

    def logprobs(
        self, state: TrainState, batch: Batch, *, temperature: float = 1.0
    ) -> Float[Array, "B L"]:
        """Computes the log-probability of each target of a batch, as `logprobs_of`.

        Args:
            state: State of the run, whose frozen matrices are read with adapters; not
                consumed.
            batch: Batch of the run's model, with `targets` int32[B, L], -100 for none.
            temperature: Divisor of the logits, above 0.

        Returns:
            Log-probabilities on every device; 0 for targets of -100.

        Raises:
            ConfigError: The temperature is not above 0.
            DataError: The batch lacks what the model requires.
            PlanError: Rows do not divide over devices and microbatches.
            StateError: The state was consumed before.
        """
        check_above_zero(temperature=temperature)
        scores, placed = self._run.token_scores, self._run.step.place_batch(batch)
        if self._is_base:
            settings = {"temperature": temperature, "has_adapters": False}
            return scores.logprobs(state, placed, **settings)
        # The next pass reads the stored parameters again: do not consume them.
        params = jax.tree.map(
            lambda x, row: to_devices(x, row, is_consumed=False),
            self._params,
            self._rows,
        )
        return scores.logprobs_by_copy(params, placed, temperature=temperature)
