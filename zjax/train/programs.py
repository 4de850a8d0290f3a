"""The programs of a run: pure functions with the shardings they are compiled for.

The plain case runs `train`, one program. A run whose update happens elsewhere or at
another time composes `gradients` and `update` itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.sharding.mesh import BATCH_AXES, num_shares
from zjax.sharding.placement import shardings
from zjax.sharding.plan import Plan
from zjax.train.average import averaged
from zjax.train.exchange import Sent
from zjax.train.gradients.strategies import GradientPrograms, make_gradients
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule, loss_scale_of, make_update
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Pure functions of arrays; `jit` them with `state_shardings`.

    Args:
        gradient_programs: The loss and its gradients.
        apply_gradients: What `zjax.train.update.make_update` builds.
        plan: Places every array.
        config: Read for `seed`.
    """

    gradient_programs: GradientPrograms
    apply_gradients: Callable[..., tuple[TrainState, Metrics]]
    plan: Plan
    config: Config

    @property
    def state_shardings(self) -> TrainState:
        """A TrainState of NamedSharding."""
        return shardings(state_rows(self.plan, self.config))

    def step_key(self, state: TrainState) -> jax.Array:
        """The random key of a step, which hangs on the seed and the step alone.

        Args:
            state: Before the step.

        Returns:
            The same key on every mesh.
        """
        return jax.random.fold_in(jax.random.key(self.config.seed), state.step)

    def gradients(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> tuple[Params, Loss]:
        """Differentiates the mean loss.

        Args:
            state: Before the step.
            batch: The global batch.
            key: Random key; that of the step by default.

        Returns:
            Gradients in logical shapes, times the loss scale; and the loss.
        """
        key = self.step_key(state) if key is None else key
        scale = loss_scale_of(state)
        return self.gradient_programs.gradients(state, batch, key, scale)

    def loss_of(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None
    ) -> Callable[[Params], Loss]:
        """The loss of a step as a function of the master weights.

        Args:
            state: Before the step.
            batch: The global batch.
            key: Random key; that of the step by default.

        Returns:
            A function of master weights in logical shapes.
        """
        key = self.step_key(state) if key is None else key
        loss, model_state = self.gradient_programs.loss, state.model_state
        return lambda master: loss(master, model_state, batch, key)

    def update(
        self,
        state: TrainState,
        grads: Params,
        loss: Loss,
        batch: Batch,
        key: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Applies gradients.

        Args:
            state: State before the step.
            grads: Gradients from `gradients`.
            loss: Loss from `gradients`.
            batch: The global batch, for optimizers that compute the loss again.
            key: Random key of the gradients; that of the step by default.

        Returns:
            The state after the step, and its metrics.
        """
        loss_of = self.loss_of(state, batch, key)
        return self.apply_gradients(state, grads, loss, lambda x: loss_of(x).value)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step: `gradients` and `update` in one program.

        Args:
            state: Before the step.
            batch: The global batch.

        Returns:
            The state after the step, and its metrics.
        """
        return self.update(state, *self.gradients(state, batch), batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """The loss of the averaged parameters where they are kept, else of these.

        Args:
            state: Any state of the run.
            batch: The global batch.

        Returns:
            Metrics of the loss, the loss and its weight.
        """
        average, programs = averaged(state, self.plan), self.gradient_programs
        if average is None:
            loss = programs.evaluate(state, batch)
        else:
            loss = programs.loss(average, state.model_state, batch, None)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}


def make_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None = None,
    sent: Sent | None = None,
) -> Programs:
    """Builds the programs of a run.

    Args:
        model: Its loss.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for the batch, `seed`, `optimizer`, `precision` and `pipeline`.
        schedule: Learning rate by applied step, for the metrics.
        sent: What the update averages over replicas; None where the compiler does.

    Returns:
        Functions that nothing has compiled yet.
    """
    shares = num_shares(plan.mesh, BATCH_AXES)
    num_microbatches = resolve_batch(config, shares).num_microbatches
    gradient_programs = make_gradients(model, plan, config, num_microbatches)
    update = make_update(tx, plan, config, schedule, model.stack, sent)
    return Programs(gradient_programs, update, plan, config)
