"""Log-probabilities and values of the tokens of a batch, by the weights of a run."""

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from zjax.errors import ModelError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.lora import without_adapters
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


class Way(NamedTuple):
    """How a program scores tokens."""

    is_cast: bool
    """Whether weights are in the compute dtype, not masters."""
    temperature: float | None
    """Divisor of the logits for log-probabilities; None for values."""
    has_adapters: bool = True


class TokenScores:
    """Scores tokens in the forward pass of a step, microbatch by microbatch.

    Scores are float32[B, L], on every device. Weights are the current ones, whatever
    their average. Offloaded parameters are copied to the devices in the compute dtype.
    """

    def __init__(self, model: Model, plan: Plan, config: Config):
        assert isinstance(plan.mesh, Mesh)  # of a run
        self._model, self._plan, self._mesh = model, plan, plan.mesh
        shares = plan.num_batch_shares
        self._num_microbatches = resolve_batch(config, shares).num_microbatches
        self._jit = make_jit(plan.mesh, step_options(config, plan))
        self._programs: dict[Way, Any] = {}

    def logprobs(
        self,
        state: TrainState,
        batch: Batch,
        *,
        temperature: float,
        has_adapters: bool = True,
    ) -> jax.Array:
        """Computes log-probabilities of the targets of a placed batch.

        Without adapters the frozen matrices score alone. Raises ModelError for a model
        that does not know log-probabilities.
        """
        self._check("target_logprobs", "use a decoder of zjax.make_model")
        weights, is_cast = self._weights(state)
        return self._run(Way(is_cast, temperature, has_adapters), weights, batch)

    def logprobs_by_copy(
        self, params: Params, batch: Batch, *, temperature: float
    ) -> jax.Array:
        """Computes log-probabilities by a result of `copy`."""
        return self._run(Way(True, temperature), params, batch)

    def values(self, state: TrainState, batch: Batch) -> jax.Array:
        """Computes values of the tokens of a placed batch.

        Raises ModelError for a model without values.
        """
        self._check("values", "use a decoder with model.value_head=True")
        weights, is_cast = self._weights(state)
        return self._run(Way(is_cast, None), weights, batch)

    def values_by_copy(self, params: Params, batch: Batch) -> jax.Array:
        """Computes values by parameters in the compute dtype, as `copy` gives them."""
        self._check("values", "use a decoder with model.value_head=True")
        return self._run(Way(True, None), params, batch)

    def _check(self, name: str, remedy: str) -> None:
        """Refuses a model whose stack lacks a function."""
        stack = self._model.stack
        if stack is None or getattr(stack, name) is None:
            problem = f"is no stack with {name}"
            remedy = f"{remedy}, or set it in the zjax.Stack"
            raise ModelError(Problem("model", "given", problem, remedy))

    def copy(self, state: TrainState) -> Params:
        """Copies the current weights to the devices, in the compute dtype.

        Raises ModelError for a model that does not know log-probabilities.
        """
        self._check("target_logprobs", "use a decoder of zjax.make_model")
        check_not_consumed(state)
        plan = staged_plan(self._plan)

        def cast(master: Params) -> Params:
            params = compute_params(unpad_tree(master, plan.master), plan)
            return pad_tree(params, plan.compute)

        # With shardings of its results a program returns no argument's memory.
        jit = functools.partial(self._jit, out_shardings=shardings(plan.compute))
        with jax.set_mesh(self._mesh), dtype_promotion():
            if state.params == ():
                return jit(cast)(state.master)
            return jit(lambda params: params)(self._staged(state))

    def _staged(self, state: TrainState) -> Params:
        """Returns the compute parameters of an offloaded state, on the devices."""
        return jax.tree.map(
            lambda x, row: to_devices(x, row, is_consumed=False),
            stored_compute(state, self._plan),
            self._plan.compute,
        )

    def _weights(self, state: TrainState) -> tuple[Params, bool]:
        """Returns current weights on the devices, and whether these are cast."""
        check_not_consumed(state)
        if state.params == ():
            return state.master, False
        return self._staged(state), True

    def _run(self, way: Way, weights: Params, batch: Batch) -> jax.Array:
        """Runs the program of a way, which compiles once."""
        with jax.set_mesh(self._mesh), dtype_promotion():
            if way not in self._programs:
                self._programs[way] = self._program(way)
            return self._programs[way](weights, batch)

    def _program(self, way: Way) -> Any:
        """Makes the program of a way."""
        plan = staged_plan(self._plan)

        def score(weights: Params, batch: Batch) -> jax.Array:
            if not way.has_adapters:
                weights = without_adapters(weights)
            if way.is_cast:
                params = unpad_tree(weights, plan.compute)
            else:
                masters = unpad_tree(weights, plan.master)
                params = compute_params_by_layer(self._model, plan, masters)
            return self._score(params, batch, way.temperature)

        return self._jit(score)

    def _score(
        self, params: Params, batch: Batch, temperature: float | None
    ) -> jax.Array:
        """Scores the microbatches of a batch by parameters as the model takes them."""
        model, stack, loss = self._model, self._model.stack, self._model.loss
        assert stack is not None
        head = stack.split(params)[2]
        execution = loss.execution if isinstance(loss, StackLoss) else ONE_BY_ONE

        def one(part: Batch) -> jax.Array:
            carry, _ = run_stack(stack, params, part, None, execution)
            if temperature is None:
                assert stack.values is not None
                return stack.values(head, carry)
            assert stack.target_logprobs is not None
            found = stack.target_logprobs(head, carry, part["targets"], temperature)
            return found.logprobs

        number, shares = self._num_microbatches, self._plan.num_batch_shares
        parts = split_batch(batch, model, number, shares)
        if number == 1:
            found = one(jax.tree.map(lambda x: x[0], parts))[None]
        else:
            found = jax.lax.map(one, parts)
        rows = join_rows(found, model, shares)
        return jax.lax.with_sharding_constraint(rows, self._plan.replicated)
