"""Log-probabilities of the targets of a batch, by the weights of a run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zjax.errors import ModelError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.lora import without_adapters
from zjax.ops.target_logprobs import TargetLogprobs
from zjax.run.compiler import step_options
from zjax.run.fused import make_jit
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.placement import pad_tree, shardings, unpad_tree
from zjax.sharding.plan import Plan, staged_plan
from zjax.stack.forward import ONE_BY_ONE, StackLoss, run_stack
from zjax.storage.move import to_devices
from zjax.train.compute_params import compute_params, compute_params_by_layer
from zjax.train.microbatches import join_rows, split_batch
from zjax.train.state import TrainState, check_not_consumed, stored_compute
from zjax.typing import Batch, Model, Params


class TargetScores:
    """Scores targets in the forward pass of a step, microbatch by microbatch.

    Raises:
        ModelError: The model is no stack that knows log-probabilities of targets.
    """

    def __init__(self, model: Model, plan: Plan, config: Config):
        stack = model.stack
        if stack is None or stack.target_logprobs is None:
            problem = "is no stack with target_logprobs"
            remedy = "use a decoder of zjax.make_model, or set it in the zjax.Stack"
            raise ModelError(Problem("model", "given", problem, remedy))
        assert isinstance(plan.mesh, Mesh)  # of a run
        self._model, self._plan, self._mesh = model, plan, plan.mesh
        shares = plan.num_batch_shares
        self._num_microbatches = resolve_batch(config, shares).num_microbatches
        self._jit = make_jit(plan.mesh, step_options(config, plan))
        self._programs: dict[Any, Any] = {}

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        *,
        temperature: float = 1.0,
        has_adapters: bool = True,
    ) -> TargetLogprobs:
        """Scores the targets of a placed batch by the current weights of a state.

        Values are float32[B, L] on every device. Offloaded parameters are copied to the
        devices in the compute dtype. Without adapters the frozen matrices score alone.
        """
        check_not_consumed(state)
        if state.params == ():
            weights, is_cast = state.master, False
        else:
            weights, is_cast = self._staged(state), True
        return self._run(weights, batch, is_cast, temperature, has_adapters)

    def by_copy(
        self, params: Params, batch: Batch, *, temperature: float = 1.0
    ) -> TargetLogprobs:
        """Scores the targets of a placed batch by a result of `copy`."""
        return self._run(params, batch, True, temperature, True)

    def copy(self, state: TrainState) -> Params:
        """Copies the current weights to the devices, in the compute dtype."""
        check_not_consumed(state)
        plan = staged_plan(self._plan)

        # A program that returned an array as it is would return the state's memory.
        def copied(params: Params) -> Params:
            return jax.tree.map(jnp.copy, params)

        def cast(master: Params) -> Params:
            params = compute_params(unpad_tree(master, plan.master), plan)
            return copied(pad_tree(params, plan.compute))

        jit = functools.partial(self._jit, out_shardings=shardings(plan.compute))
        with jax.set_mesh(self._mesh), dtype_promotion():
            if state.params == ():
                return jit(cast)(state.master)
            return jit(copied)(self._staged(state))

    def _staged(self, state: TrainState) -> Params:
        """Returns the compute parameters of an offloaded state, on the devices."""
        return jax.tree.map(
            lambda x, row: to_devices(x, row, is_consumed=False),
            stored_compute(state, self._plan),
            self._plan.compute,
        )

    def _run(
        self,
        weights: Params,
        batch: Batch,
        is_cast: bool,
        temperature: float,
        has_adapters: bool,
    ) -> TargetLogprobs:
        """Runs the program for the settings of `_program`, which compiles once."""
        key = is_cast, temperature, has_adapters
        with jax.set_mesh(self._mesh), dtype_promotion():
            if key not in self._programs:
                self._programs[key] = self._program(*key)
            return self._programs[key](weights, batch)

    def _program(self, is_cast: bool, temperature: float, has_adapters: bool) -> Any:
        """Makes the program for masters, or for weights in the compute dtype."""
        plan = staged_plan(self._plan)

        def score(weights: Params, batch: Batch) -> TargetLogprobs:
            if not has_adapters:
                weights = without_adapters(weights)
            if is_cast:
                params = unpad_tree(weights, plan.compute)
            else:
                masters = unpad_tree(weights, plan.master)
                params = compute_params_by_layer(self._model, plan, masters)
            return self._score(params, batch, temperature)

        return self._jit(score)

    def _score(self, params: Params, batch: Batch, temperature: float) -> Any:
        """Scores the microbatches of a batch by parameters as the model takes them."""
        model, stack, loss = self._model, self._model.stack, self._model.loss
        assert stack is not None and stack.target_logprobs is not None
        score, head = stack.target_logprobs, stack.split(params)[2]
        execution = loss.execution if isinstance(loss, StackLoss) else ONE_BY_ONE

        def one(part: Batch) -> Any:
            carry, _ = run_stack(stack, params, part, None, execution)
            return score(head, carry, part["targets"], temperature)

        number, shares = self._num_microbatches, self._plan.num_batch_shares
        parts = split_batch(batch, model, number, shares)
        if number == 1:
            found = one(jax.tree.map(lambda x: x[0], parts))
            found = jax.tree.map(lambda x: x[None], found)
        else:
            found = jax.lax.map(one, parts)

        def whole(x: jax.Array) -> jax.Array:
            rows = join_rows(x, model, shares)
            return jax.lax.with_sharding_constraint(rows, self._plan.replicated)

        return jax.tree.map(whole, found)
