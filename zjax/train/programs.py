"""The programs of a run: pure functions with the shardings they are compiled for.

The plain case runs `train`, one program. A run whose update happens elsewhere or at
another time composes `gradients` and `update` itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.sharding.placement import shardings
from zjax.sharding.plan import Plan
from zjax.train.average import averaged
from zjax.train.gradients.strategies import make_gradients
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule, loss_scale_of, make_update
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True)
class Programs:
    """Pure functions of arrays; `jit` them with `state_shardings`.

    Args:
        gradients: `gradients(state, batch) -> (grads, loss)`.
        update: `update(state, grads, loss, batch) -> (state, metrics)`.
        train: `train(state, batch) -> (state, metrics)`, the two above in one.
        evaluate: `evaluate(state, batch) -> metrics`; uses the averaged parameters
            where they are kept.
        state_shardings: A TrainState of NamedSharding.
    """

    gradients: Callable[[TrainState, Batch], tuple[Params, Loss]]
    update: Callable[[TrainState, Params, Loss, Batch], tuple[TrainState, Metrics]]
    train: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Metrics]
    state_shardings: TrainState


def make_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    *,
    num_microbatches: int,
    schedule: Schedule | None = None,
) -> Programs:
    """Builds the programs of a run.

    The random key of a step depends on the seed and the step alone, not on the mesh.

    Args:
        model: Its loss.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `seed`, `optimizer`, `precision` and `pipeline`.
        num_microbatches: Gradient accumulation, 1 or more.
        schedule: Learning rate by applied step, for the metrics.

    Returns:
        Functions that nothing has compiled yet.
    """
    differentiated = make_gradients(model, plan, config, num_microbatches)
    update = make_update(tx, plan, config, schedule)

    def step_key(state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.key(config.seed), state.step)

    def gradients_of(state: TrainState, batch: Batch) -> tuple[Params, Loss]:
        key, scale = step_key(state), loss_scale_of(state)
        return differentiated.gradients(state, batch, key, scale)

    def update_with(
        state: TrainState, grads: Params, loss: Loss, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        def value_fn(master: Params) -> jax.Array:
            key = step_key(state)
            return differentiated.loss(master, state.model_state, batch, key).value

        return update(state, grads, loss, value_fn)

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return update_with(state, *gradients_of(state, batch), batch)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        average = averaged(state, plan)
        if average is None:
            loss = differentiated.evaluate(state, batch)
        else:
            loss = differentiated.loss(average, state.model_state, batch, None)
        return loss.metrics | {"loss": loss.value, "weight": loss.weight}

    rows = state_rows(plan, config)
    return Programs(gradients_of, update_with, train, evaluate, shardings(rows))
