"""Programs of a run with compressed messages between replicas (1-bit Adam, codecs).

Inside `shard_map` over `replica`, each replica differentiates the loss of the local
rows. All else is an ordinary step, except that the update averages the message of the
phase.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.comm import packed, shards
from zjax.ops.keys import fold_in
from zjax.sharding.mesh import REPLICA
from zjax.sharding.plan import Plan
from zjax.train import microbatches
from zjax.train.programs import Programs
from zjax.train.state import TrainState
from zjax.typing import Batch, Loss, Metrics, Model, Params


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaPrograms:
    """Pure functions of arrays; `jit` with shardings of `state_rows`.

    Args:
        phases: `Programs` of one replica, by name of the phase.
        model: Model with the loss to differentiate.
        plan: Placement of every array of the run.
    """

    phases: Mapping[str, Programs]
    model: Model
    plan: Plan

    def train(
        self, phase: str, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Takes one step of a phase, given by name, on the global batch."""
        programs = self.phases[phase]

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return train_together(programs, self.model, state, batch)

        return self._mapped(step, (_STATE, P()))(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Evaluates the loss, with averaged parameters if the state has an average."""
        # Phases differ in the update alone, so any phase evaluates.
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
    """Takes one step of a replica, inside `map_replicas`; the update sends messages.

    `state` and `batch` are the replica's share; the metrics are equal on all replicas.
    """
    key = key_of_replica(programs.step_key(state), model)
    grads, loss = programs.gradients(state, batch, key)
    loss, share = _mean_loss(loss)
    # The plain mean over replicas of scaled gradients is the mean weighted by tokens.
    grads = jax.tree.map(lambda g: microbatches.scaled(g, share), grads)
    value_fn = _mean_value(programs.loss_of(state, batch, key))
    return programs.apply_gradients(state, grads, loss, value_fn)


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


def map_replicas(
    run: Any, model: Model, plan: Plan, state: TrainState, outs: Any
) -> Any:
    """Maps `run(state, batch)` over replicas; `state` and `outs` are PartitionSpecs."""

    def call(inputs: TrainState, batch: Batch) -> Any:
        by_row = microbatches.row_specs(batch, model, (REPLICA,))
        return jax.shard_map(
            run,
            mesh=plan.mesh,
            in_specs=(state, by_row),
            out_specs=outs,
            # The remaining axes stay with the compiler, which shards each replica.
            axis_names={REPLICA},
            check_vma=False,
        )(inputs, batch)

    return call


def state_spec(common: P, **others: P) -> TrainState:
    """Builds the specs of a state: `common`, except for fields named in `others`."""
    names = (field.name for field in dataclasses.fields(TrainState))
    return TrainState(**dict.fromkeys(names, common) | others)


_STATE = state_spec(P(), extra=P(REPLICA))
"""Every replica has an error feedback of its own; all other arrays are equal."""


def key_of_replica(key: jax.Array, model: Model) -> jax.Array | None:
    """Returns the random key of a replica.

    Separable losses draw by row, which differs already; all other losses would draw
    alike in all replicas.
    """
    if model.separable:
        return key
    return fold_in(key, jax.lax.axis_index(REPLICA))


def _mean_loss(loss: Loss) -> tuple[Loss, jax.Array]:
    """Averages the loss over replicas, and weighs this replica: 1 if all are equal."""
    gathered = packed.all_gather(loss._replace(model_state=()), REPLICA)
    average = functools.partial(shards.mean_over, axes=(REPLICA,))
    mean = microbatches.mean_loss(gathered, jax.tree.map(average, loss.model_state))
    number = jax.lax.axis_size(REPLICA)
    return mean, loss.weight * number / jnp.where(mean.weight == 0, 1, mean.weight)
