"""The programs of replicas that take local steps: DiLoCo and its relatives.

In a local step a replica differentiates the loss of its rows and updates its own
parameters, and no number crosses `replica`. A fragment of the outer gradients, the
anchor minus the parameters, is averaged by a program of its own, whose result a third
one applies to the anchor and to the parameters of the replicas.

Reference: DiLoCo, arXiv:2311.08105; Streaming DiLoCo, arXiv:2501.18512; MuLoCo,
arXiv:2505.23725.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.config.schema import Config
from zjax.optim.nesterov import nesterov
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.train.exchange import Exchange
from zjax.train.fragments import Fragment
from zjax.train.outer_state import make_exchange
from zjax.train.programs import Programs
from zjax.train.replicas import key_of_replica, map_replicas, state_spec
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics, Model


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """One step of every replica for itself; a pure function of arrays.

    Args:
        programs: Those of one replica.
        model: Its loss.
        plan: Places every array.
    """

    programs: Programs
    model: Model
    plan: Plan

    def __call__(
        self, replicas: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Takes the step.

        Args:
            replicas: `Outer.replicas` with the `step` of the run.
            batch: The global batch.

        Returns:
            The same after the step, and the metrics, which each device has of its own
            replica.
        """

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state = _with_step(
                jax.tree.map(lambda x: x[0], _without_step(state)), state
            )
            key = key_of_replica(self.programs.step_key(state), self.model)
            grads, loss = self.programs.gradients(state, batch, key)
            new, metrics = self.programs.update(state, grads, loss, batch)
            stacked = jax.tree.map(lambda x: x[None], _without_step(new))
            return _with_step(stacked, new), metrics

        run = map_replicas(step, self.model, self.plan, _REPLICAS, (_REPLICAS, P()))
        return run(replicas, batch)


_REPLICAS = state_spec(P(REPLICA), step=P())


def _without_step(state: TrainState) -> TrainState:
    return dataclasses.replace(state, step=())


def _with_step(state: TrainState, other: TrainState) -> TrainState:
    return dataclasses.replace(state, step=other.step)


@dataclasses.dataclass(frozen=True, eq=False)
class OuterStep:
    """How a fragment leaves the replicas and comes back; pure functions of arrays.

    Args:
        fragment: Some of the parameters.
        exchange: Averages it.
        plan: Places every array.
        config: Read for `communication`.
    """

    fragment: Fragment
    exchange: Exchange
    plan: Plan
    config: Config

    def outer_gradients(self, anchor: Any, master: Any) -> list[jax.Array]:
        """The anchor minus the parameters, float32[N, ...] by array.

        Args:
            anchor: Parameters that the replicas shared last.
            master: Those of the replicas, arrays [N, ...].
        """
        start = self.fragment.take(jax.tree.leaves(anchor))
        end = self.fragment.take(jax.tree.leaves(master), dim=1)
        return [
            a.astype(jnp.float32)[None] - x.astype(jnp.float32)
            for a, x in zip(start, end, strict=True)
        ]

    def mean(self, grads: list[jax.Array], errors: Any) -> tuple[list[jax.Array], Any]:
        """Averages outer gradients over replicas.

        Args:
            grads: Result of `outer_gradients`.
            errors: What the codec lost of this fragment so far.

        Returns:
            The mean, the same bits on every replica, and the errors.
        """

        def of_replica(grads: list[jax.Array], errors: Any) -> Any:
            own = [g[0] for g in grads]
            mean, errors = self.exchange(own, errors, jnp.bool_(True))
            rows = self.exchange.plan.grads, self.fragment_rows
            return list(map(_without_padding, mean, *rows)), errors

        return jax.shard_map(
            of_replica,
            mesh=self.plan.mesh,
            in_specs=(P(REPLICA), P(REPLICA)),
            out_specs=(P(), P(REPLICA)),
            axis_names={REPLICA},
            check_vma=False,
        )(grads, errors)

    @property
    def fragment_rows(self) -> list[ArrayPlan]:
        """Plans of the arrays of which the fragment holds all or some layers."""
        rows = jax.tree.leaves(self.plan.master)
        return [rows[piece.leaf] for piece in self.fragment.pieces]

    def merge(
        self, anchor: Any, momentum: Any, master: Any, grads: list[jax.Array]
    ) -> tuple[Any, Any, Any]:
        """Takes a step of the outer optimizer.

        Args:
            anchor: Parameters that the replicas shared last.
            momentum: Momentum of the outer optimizer.
            master: Parameters of the replicas, arrays [N, ...].
            grads: Mean outer gradients.

        Returns:
            The anchor, the momentum and the parameters of the replicas.
        """
        settings, fragment = self.config.communication, self.fragment
        trees = anchor, momentum, master
        (anchors, momenta, masters), forms = zip(
            *map(jax.tree.flatten, trees), strict=True
        )
        shared, slow = nesterov(
            fragment.take(anchors),
            fragment.take(momenta),
            grads,
            settings.outer_learning_rate,
            settings.outer_momentum,
        )
        mixed = [
            self._mixed(x, a)
            for x, a in zip(fragment.take(masters, dim=1), shared, strict=True)
        ]
        leaves = (
            fragment.put(anchors, shared),
            fragment.put(momenta, slow),
            fragment.put(masters, mixed, dim=1),
        )
        return tuple(map(jax.tree.unflatten, forms, leaves))

    def _mixed(self, local: jax.Array, shared: jax.Array) -> jax.Array:
        share = self.config.communication.mixing
        if not share:
            return jnp.broadcast_to(shared, local.shape)
        return share * local + (1 - share) * shared[None]


def _without_padding(x: jax.Array, row: ArrayPlan, whole: ArrayPlan) -> jax.Array:
    """Zeros behind the logical shape, which some codecs do not keep."""
    layers = {0} if row.shape != whole.stored_shape else set()
    for dim, size in enumerate(whole.shape):
        if dim not in layers and size < x.shape[dim]:
            index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            x = jnp.where(index < size, x, 0)
    return x


def make_outer_step(plan: Plan, config: Config, fragment: Fragment) -> OuterStep:
    """Builds the programs of a fragment.

    Args:
        plan: Places every array.
        config: Checked settings.
        fragment: Some of the parameters.
    """
    return OuterStep(fragment, make_exchange(plan, config, fragment), plan, config)


def end_of_round(
    model_state: Any, num_skipped: jax.Array, plan: Plan
) -> tuple[Any, Any, Any]:
    """What replicas share at the end of a round besides parameters.

    Args:
        model_state: Of every replica, arrays [N, ...].
        num_skipped: int32[N].
        plan: Places every array.

    Returns:
        The mean model state, the same for every replica, [N, ...], and the number of
        skipped steps of the replica that skipped most.
    """

    def share(model_state: Any, num_skipped: jax.Array) -> Any:
        shared = jax.tree.map(_mean_of_replicas, model_state)
        most = jax.lax.pmax(num_skipped[0], REPLICA)
        return jax.tree.map(lambda x: x[0], shared), shared, most

    return jax.shard_map(
        share,
        mesh=plan.mesh,
        in_specs=P(REPLICA),
        out_specs=(P(), P(REPLICA), P()),
        axis_names={REPLICA},
        check_vma=False,
    )(model_state, num_skipped)


def _mean_of_replicas(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.pmean(x, REPLICA)
    return jax.lax.all_gather(x, REPLICA)[0]
