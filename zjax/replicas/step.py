"""One step of every replica, with or without a message between replicas.

Inside `shard_map` over `replica`, each replica differentiates the loss of the local
rows. All else is an ordinary step, except that the update averages the message of the
phase; in a local step no number crosses `replica`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.ops import packed, shards
from zjax.ops.keys import fold_in
from zjax.replicas.exchange import map_replicas
from zjax.replicas.state import Outer, of_replicas, with_extra
from zjax.sharding.mesh import REPLICA
from zjax.sharding.plan import Plan
from zjax.train import microbatches
from zjax.train.programs import Programs
from zjax.train.state import TrainState
from zjax.typing import Batch, Loss, Metrics, Model, Params


def _specs(common: P, **others: P) -> TrainState:
    """Builds the specs of a state: `common`, except for fields named in `others`."""
    names = (field.name for field in dataclasses.fields(TrainState))
    return TrainState(**dict.fromkeys(names, common) | others)


_SHARED = _specs(P(), extra=P(REPLICA))
"""Replicas differ in the error feedback; all further arrays are equal."""
_STACKED = _specs(P(REPLICA), step=P())
"""Every array has a leading dim of replicas, except the step counter."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaStep:
    """The steps of all replicas as pure functions of arrays.

    Args:
        feeds_back: Whether the messages have an error feedback; with local steps the
            outer gradients share it, and are in one fragment.
    """

    programs: Programs
    model: Model
    plan: Plan
    feeds_back: bool = False

    def apart(self, replicas: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes a step of each replica by itself.

        `replicas` is the state of the replicas with the step of the run. The metrics on
        each device come from the local replica.
        """

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state, programs = _of_one(state), self.programs
            key = _key_of_replica(programs.step_key(state), self.model)
            grads, loss = programs.gradients(state, batch, key)
            new, metrics = programs.update(state, grads, loss, batch, key)
            return _stacked(new), metrics

        # P() for metrics that differ between replicas saves an exchange in every local
        # step.
        return self._map(step, _STACKED, (_STACKED, P()), replicas, batch)

    def together(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes a step of all replicas, which are equal before and after."""
        if not isinstance(outer := state.extra, Outer):
            return self._map(self._send, _SHARED, (_SHARED, P()), state, batch)

        def step(replica: TrainState, batch: Batch) -> Any:
            new, metrics = self._send(_of_one(replica), batch)
            # These fields stay in `extra.replicas`, one copy per replica.
            common = dataclasses.replace(new, opt_state=(), scaler=(), extra=())
            return _stacked(new), common, metrics

        errors = outer.errors[0] if self.feeds_back else ()
        replicas = dataclasses.replace(of_replicas(state), extra=errors)
        outs = _STACKED, P(), P()
        replicas, common, metrics = self._map(step, _STACKED, outs, replicas, batch)
        errors = (replicas.extra,) if self.feeds_back else outer.errors
        replicas = dataclasses.replace(replicas, step=(), extra=())
        common = dataclasses.replace(common, extra=outer)
        return with_extra(common, replicas=replicas, errors=errors), metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Evaluates the loss, with averaged parameters if the state has an average."""

        def evaluate(state: TrainState, batch: Batch) -> Metrics:
            metrics = self.programs.evaluate(state, batch)
            value, weight = metrics.pop("loss"), metrics.pop("weight")
            loss, _ = _mean_loss(Loss(value, weight, (), metrics, ()))
            return loss.metrics | {"loss": loss.value, "weight": loss.weight}

        return self._map(evaluate, _SHARED, P(), state, batch)

    def _send(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes the step of one replica, whose update averages the message.

        `state` and `batch` are the replica's share; the metrics are equal on all
        replicas.
        """
        programs = self.programs
        key = _key_of_replica(programs.step_key(state), self.model)
        grads, loss = programs.gradients(state, batch, key)
        loss, share = _mean_loss(loss)
        # The plain mean over replicas of scaled gradients is the mean weighted by
        # tokens.
        grads = jax.tree.map(lambda g: microbatches.scaled(g, share), grads)
        value_fn = _mean_value(programs.loss_of(state, batch, key))
        return programs.apply_gradients(state, grads, loss, value_fn)

    def _map(
        self, run: Any, spec: TrainState, outs: Any, state: TrainState, batch: Batch
    ) -> Any:
        """Maps `run(state, batch)` over replicas; `spec` and `outs` are specs."""
        by_row = microbatches.row_specs(batch, self.model, (REPLICA,))
        mapped = map_replicas(run, self.plan.mesh, (spec, by_row), outs)
        return mapped(state, batch)


def _of_one(state: TrainState) -> TrainState:
    """Drops the leading dim of replicas from a replica's state."""
    return _each(lambda x: x[0], state)


def _stacked(state: TrainState) -> TrainState:
    """Adds the leading dim of replicas, the inverse of `_of_one`."""
    return _each(lambda x: x[None], state)


def _each(function: Callable[[jax.Array], jax.Array], state: TrainState) -> TrainState:
    """Applies a function to all arrays of a state except the step and errors."""
    stacked = dataclasses.replace(state, step=(), extra=())
    own = jax.tree.map(function, stacked)
    return dataclasses.replace(own, step=state.step, extra=state.extra)


def _key_of_replica(key: jax.Array, model: Model) -> jax.Array | None:
    """Returns the random key of a replica.

    Separable losses draw by row, which differs already; all other losses would draw
    alike in all replicas.
    """
    if model.separable:
        return key
    return fold_in(key, jax.lax.axis_index(REPLICA))


def _mean_value(loss_of: Callable[[Params], Loss]) -> Callable[[Params], jax.Array]:
    """Returns the mean loss of all replicas as a function, for line searches."""

    def value_fn(master: Params) -> jax.Array:
        loss = loss_of(_shared(master))
        total = jax.lax.pmean(loss.weight, REPLICA)
        weighted = loss.value * loss.weight / jnp.where(total == 0, 1, total)
        return jax.lax.pmean(weighted, REPLICA)

    return value_fn


@jax.custom_vjp
def _shared(params: Params) -> Params:
    """The identity, with a backward pass that averages gradients over replicas."""
    return params


_shared.defvjp(
    lambda params: (params, None),
    lambda _, grads: (jax.tree.map(lambda g: shards.mean_over(g, (REPLICA,)), grads),),
)


def _mean_loss(loss: Loss) -> tuple[Loss, jax.Array]:
    """Averages the loss over replicas, and weighs this replica: 1 if all are equal."""
    gathered = packed.all_gather(loss._replace(model_state=()), REPLICA)
    average = functools.partial(shards.mean_over, axes=(REPLICA,))
    mean = microbatches.mean_loss(gathered, jax.tree.map(average, loss.model_state))
    number = jax.lax.axis_size(REPLICA)
    return mean, loss.weight * number / jnp.where(mean.weight == 0, 1, mean.weight)
