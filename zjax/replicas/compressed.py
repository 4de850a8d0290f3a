"""The programs of a run whose replicas send each other packed messages.

Inside `shard_map` over `replica`, each replica differentiates the loss of its rows; the
rest is the step of any run, except that its update averages what the phase sends.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.comm import messages, shards
from zjax.comm.codecs import make_codec
from zjax.ops.keys import fold_in
from zjax.optim.phases import Phase, Phases
from zjax.settings.schema import Config
from zjax.sharding.mesh import REPLICA
from zjax.sharding.plan import Plan
from zjax.train import microbatches
from zjax.train.exchange import Exchange, Sent
from zjax.train.programs import Programs, make_programs
from zjax.train.state import TrainState
from zjax.train.update import Schedule
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaPrograms:
    """Pure functions of arrays; `jit` them with `state_shardings`.

    Args:
        phases: `Programs` of one replica, by phase.
        model: Its loss.
        plan: Places every array of the run.
    """

    phases: Mapping[str, Programs]
    model: Model
    plan: Plan

    @property
    def state_shardings(self) -> TrainState:
        """A TrainState of NamedSharding."""
        return next(iter(self.phases.values())).state_shardings

    def train(
        self, phase: str, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """One step."""
        programs = self.phases[phase]

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return train_together(programs, self.model, state, batch)

        return self._mapped(step, (_STATE, P()))(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """The loss of the averaged parameters where they are kept, else of these."""
        programs = next(iter(self.phases.values()))

        def evaluate(state: TrainState, batch: Batch) -> Metrics:
            metrics = programs.evaluate(state, batch)
            value, weight = metrics.pop("loss"), metrics.pop("weight")
            loss, _ = _mean_loss(Loss(value, weight, (), metrics, ()))
            return loss.metrics | {"loss": loss.value, "weight": loss.weight}

        return self._mapped(evaluate, P())(state, batch)

    def _mapped(self, run: Any, outs: Any) -> Any:
        return map_replicas(run, self.model, self.plan, _STATE, outs)


def train_together(
    programs: Programs, model: Model, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """One step of a replica, inside `map_replicas`, whose update sends messages."""
    key = key_of_replica(programs.step_key(state), model)
    grads, loss = programs.gradients(state, batch, key)
    loss, share = _mean_loss(loss)
    grads = jax.tree.map(lambda g: microbatches.scaled(g, share), grads)
    value_fn = _mean_value(programs.loss_of(state, batch, key))
    return programs.apply_gradients(state, grads, loss, value_fn)


def _mean_value(loss_of: Callable[[Params], Loss]) -> Callable[[Params], jax.Array]:
    """The mean loss of all replicas and its gradient, for optimizers that ask again."""

    def value_fn(master: Params) -> jax.Array:
        loss = loss_of(_shared(master))
        total = jax.lax.pmean(loss.weight, REPLICA)
        weighted = loss.value * loss.weight / jnp.where(total == 0, 1, total)
        return jax.lax.pmean(weighted, REPLICA)

    return value_fn


@jax.custom_vjp
def _shared(params: Params) -> Params:
    """The same parameters, which get the mean gradient of all replicas."""
    return params


_shared.defvjp(
    lambda params: (params, None),
    lambda _, grads: (jax.tree.map(lambda g: shards.mean_over(g, (REPLICA,)), grads),),
)


def map_replicas(
    run: Any, model: Model, plan: Plan, state: TrainState, outs: Any
) -> Any:
    """Maps a function of a state and a batch over replicas."""

    def call(inputs: TrainState, batch: Batch) -> Any:
        by_row = microbatches.row_specs(batch, model, (REPLICA,))
        return jax.shard_map(
            run,
            mesh=plan.mesh,
            in_specs=(state, by_row),
            out_specs=outs,
            axis_names={REPLICA},
            check_vma=False,
        )(inputs, batch)

    return call


def state_spec(common: P, **others: P) -> TrainState:
    """Specs of a state: a common one, and those of other fields by name."""
    names = (field.name for field in dataclasses.fields(TrainState))
    return TrainState(**dict.fromkeys(names, common) | others)


_STATE = state_spec(P(), extra=P(REPLICA))
"""Replicas have errors of their own."""


def key_of_replica(key: jax.Array, model: Model) -> jax.Array | None:
    """Separable losses draw by row; others would draw alike in all replicas."""
    if model.separable:
        return key
    return fold_in(key, jax.lax.axis_index(REPLICA))


def _mean_loss(loss: Loss) -> tuple[Loss, jax.Array]:
    """The mean loss of all replicas, and the share of this one times their number."""
    gathered = messages.all_gather(loss._replace(model_state=()), REPLICA)
    average = functools.partial(shards.mean_over, axes=(REPLICA,))
    mean = microbatches.mean_loss(gathered, jax.tree.map(average, loss.model_state))
    number = jax.lax.axis_size(REPLICA)
    return mean, loss.weight * number / jnp.where(mean.weight == 0, 1, mean.weight)


def make_replica_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None,
    phases: Phases,
) -> ReplicaPrograms:
    """Builds the programs of a run with phases."""

    def programs(phase: Phase) -> Programs:
        sent = Sent(phase, Exchange(plan, make_codec(phase.codec)))
        return make_programs(model, tx, plan.of_replica, config, schedule, sent)

    by_name = {name: programs(phase) for name, phase in phases.by_name.items()}
    return ReplicaPrograms(by_name, model, plan)
