"""Programs of replicas that take local steps: DiLoCo, 0/1 Adam and relatives.

In a local step a replica differentiates the loss of the local rows and updates a
private copy of the parameters; no number crosses `replica`. The outer gradients of a
fragment are the anchor (the parameters shared last) minus the replica's parameters. A
second program averages outer gradients, and a third program applies the mean to the
anchor and to the replicas.

Reference: DiLoCo, arXiv:2311.08105; Streaming DiLoCo, arXiv:2501.18512; MuLoCo,
arXiv:2505.23725; 0/1 Adam, arXiv:2202.06009.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zjax.comm import packed, shards
from zjax.optim.transforms import nesterov
from zjax.replicas.compressed import (
    key_of_replica,
    map_replicas,
    state_spec,
    train_together,
)
from zjax.schedule.exchange import Exchanges, Phase
from zjax.settings.schema import LocalSteps
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan, pad_tree, place_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.roles import with_followers
from zjax.train import microbatches
from zjax.train.exchange import Exchange
from zjax.train.outer_state import Fragment, make_exchange
from zjax.train.programs import Programs
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics, Model


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """One step of every replica by itself; a pure function of arrays.

    Args:
        programs: `Programs` of one replica.
        model: Model with the loss to differentiate.
        plan: Placement of every array.
    """

    programs: Programs
    model: Model
    plan: Plan

    def __call__(
        self, replicas: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Takes the step on the global batch.

        `replicas` is `Outer.replicas` with the `step` of the run. The metrics on each
        device come from the local replica.
        """

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            state = _of_one(state)
            key = key_of_replica(self.programs.step_key(state), self.model)
            grads, loss = self.programs.gradients(state, batch, key)
            new, metrics = self.programs.update(state, grads, loss, batch, key)
            return _stacked(new), metrics

        # P() for metrics that differ between replicas saves an exchange in every local
        # step.
        run = map_replicas(step, self.model, self.plan, _REPLICAS, (_REPLICAS, P()))
        return run(replicas, batch)


_REPLICAS = state_spec(P(REPLICA), step=P())
"""Every array has a leading dim of replicas, except the step counter."""


@dataclasses.dataclass(frozen=True, eq=False)
class CommonStep:
    """One step of all replicas together; a pure function of arrays.

    Args:
        programs: `Programs` of one replica, with an update that sends messages.
        model: Model with the loss to differentiate.
        plan: Placement of every array.
        feeds_back: Whether the messages share the error feedback of outer gradients,
            which are then in one fragment.
    """

    programs: Programs
    model: Model
    plan: Plan
    feeds_back: bool

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes the step; replicas and anchor are equal before and after."""

        def step(replica: TrainState, batch: Batch) -> Any:
            programs, model = self.programs, self.model
            new, metrics = train_together(programs, model, _of_one(replica), batch)
            # These fields stay in `extra.replicas`, one copy per replica.
            common = dataclasses.replace(new, opt_state=(), scaler=(), extra=())
            return _stacked(new), common, metrics

        outer = state.extra
        errors = outer.errors[0] if self.feeds_back else ()
        replicas = dataclasses.replace(outer.replicas, step=state.step, extra=errors)
        run = map_replicas(
            step, self.model, self.plan, _REPLICAS, (_REPLICAS, P(), P())
        )
        replicas, common, metrics = run(replicas, batch)
        errors = (replicas.extra,) if self.feeds_back else outer.errors
        replicas = dataclasses.replace(replicas, step=(), extra=())
        extra = outer._replace(replicas=replicas, errors=errors)
        return dataclasses.replace(common, extra=extra), metrics


def _of_one(state: TrainState) -> TrainState:
    """Drops the leading dim of replicas from a replica's state, except from errors."""
    stacked = dataclasses.replace(state, step=(), extra=())
    own = jax.tree.map(lambda x: x[0], stacked)
    return dataclasses.replace(own, step=state.step, extra=state.extra)


def _stacked(state: TrainState) -> TrainState:
    """Adds the leading dim of replicas, the inverse of `_of_one`."""
    own = dataclasses.replace(state, step=(), extra=())
    stacked = jax.tree.map(lambda x: x[None], own)
    return dataclasses.replace(stacked, step=state.step, extra=state.extra)


@dataclasses.dataclass(frozen=True, eq=False)
class OuterStep:
    """One exchange of a fragment between replicas; pure functions of arrays.

    Args:
        fragment: Subset of the parameters.
        exchange: Mean over replicas of the fragment.
        plan: Placement of every array.
        settings: Settings of rounds.
    """

    fragment: Fragment
    exchange: Exchange
    plan: Plan
    settings: LocalSteps

    def outer_gradients(self, anchor: Any, replicas: TrainState) -> list[jax.Array]:
        """Subtracts each replica's parameters from the anchor: float32[N, ...]."""
        start = self.fragment.take(jax.tree.leaves(anchor))
        end = self.fragment.take(jax.tree.leaves(replicas.master), dim=1)
        return [
            a.astype(jnp.float32)[None] - x.astype(jnp.float32)
            for a, x in zip(start, end, strict=True)
        ]

    def mean(self, grads: list[jax.Array], errors: Any) -> tuple[list[jax.Array], Any]:
        """Averages outer gradients over replicas, with the fragment's error feedback.

        The mean has equal bits on every replica.
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
        self,
        anchor: Any,
        momentum: Any,
        replicas: TrainState,
        grads: list[jax.Array],
    ) -> tuple[Any, Any, TrainState]:
        """Takes a step of the outer optimizer with the mean outer gradients.

        Returns the anchor, the momentum of the outer optimizer and the replicas.
        """
        settings, fragment = self.settings, self.fragment
        # None, for parameters without momentum, must stay a leaf: leaves go by
        # position.
        trees = anchor, momentum, replicas.master
        (anchors, momenta, masters), forms = zip(
            *(jax.tree.flatten(tree, is_leaf=lambda x: x is None) for tree in trees),
            strict=True,
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
        anchor, momentum, master = map(jax.tree.unflatten, forms, leaves)
        return anchor, momentum, dataclasses.replace(replicas, master=master)

    def _mixed(self, local: jax.Array, shared: jax.Array) -> jax.Array:
        """Mixes local into shared parameters, by `local_steps.mixing`."""
        share = self.settings.mixing
        if not share:
            return jnp.broadcast_to(shared, local.shape)
        return share * local + (1 - share) * shared[None]


def _without_padding(x: jax.Array, row: ArrayPlan, whole: ArrayPlan) -> jax.Array:
    """Zeroes the padding behind the logical shape, as some codecs cannot send a 0."""
    # A fragment with some layers has a shorter first dim, which is no padding.
    layers = {0} if row.shape != whole.stored_shape else set()
    for dim, size in enumerate(whole.shape):
        if dim not in layers and size < x.shape[dim]:
            index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            x = jnp.where(index < size, x, 0)
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class MomentumStep(OuterStep):
    """An outer step that the optimizer of the replicas takes, as in 0/1 Adam.

    Args:
        tx: Optax gradient transformation; `update` takes the phase.
        phase: Phase of the exchange and of the merge.
    """

    tx: Any
    phase: Phase

    def merge(
        self,
        anchor: Any,
        momentum: Any,
        replicas: TrainState,
        grads: list[jax.Array],
    ) -> tuple[Any, Any, TrainState]:
        """Moves the anchor, and resets replicas to the anchor and one momentum."""
        leaves, tree = jax.tree.flatten(anchor)
        # The optimizer takes whole trees: parameters outside the fragment move by 0.
        zeros = [jnp.zeros_like(x) for x in leaves]
        mean = tree.unflatten(self.fragment.put(zeros, grads))
        shared, master, opt_state = jax.shard_map(
            self._merge,
            mesh=self.plan.mesh,
            in_specs=(P(), P(REPLICA), P()),
            out_specs=(P(), P(REPLICA), P(REPLICA)),
            axis_names={REPLICA},
            check_vma=False,
        )(anchor, replicas.opt_state, mean)
        rows = self.plan.master
        anchor = with_followers(shared, anchor, rows, "gradient")
        master = with_followers(master, replicas.master, rows, "gradient")
        replicas = dataclasses.replace(replicas, master=master, opt_state=opt_state)
        return anchor, momentum, replicas

    def _merge(self, anchor: Any, opt_state: Any, mean: Any) -> tuple[Any, Any, Any]:
        """Runs the optimizer's merge on one replica, with results equal on all."""
        plan = self.plan.of_replica
        opt_state = jax.tree.map(lambda x: x[0], opt_state)
        opt_state = unpad_tree(opt_state, plan.opt_state)
        # A replica that skipped a step has moved with fewer learning rates.
        rate_sum = optax.tree_utils.tree_get(opt_state, "rate_sum")
        steps = optax.tree_utils.tree_get(opt_state, "steps")
        opt_state = optax.tree_utils.tree_set(
            opt_state,
            rate_sum=jax.lax.pmean(rate_sum, REPLICA),
            steps=jax.lax.pmax(steps, REPLICA),
        )
        params = unpad_tree(anchor, plan.master)
        updates, opt_state = self.tx.update(
            unpad_tree(mean, plan.master), opt_state, params, phase=self.phase.name
        )
        params = place_tree(optax.apply_updates(params, updates), plan.master)
        anchor = pad_tree(params, plan.master)
        own = anchor, pad_tree(opt_state, plan.opt_state)
        return anchor, *jax.tree.map(lambda x: x[None], own)


def make_outer_step(
    plan: Plan,
    settings: LocalSteps,
    fragment: Fragment,
    tx: Any,
    exchanges: Exchanges,
) -> OuterStep:
    """Builds the exchange of a fragment; `tx` is the optimizer of the replicas."""
    exchange = make_exchange(plan, exchanges.outer_codec, fragment)
    if exchanges.outer_phase is None:
        return OuterStep(fragment, exchange, plan, settings)
    return MomentumStep(fragment, exchange, plan, settings, tx, exchanges.outer_phase)


def end_of_round(
    averaged: Any, num_skipped: jax.Array, metrics: Metrics, plan: Plan
) -> tuple[Any, Any, Any, Metrics]:
    """Shares, at the end of a round, all arrays that no fragment holds.

    `averaged` has the model state and the parameters that follow totals, arrays [N,
    ...], and `num_skipped` is int32[N]. Returns the means of `averaged`; the means and
    the skip count for every replica, [N, ...]; the skip count, the maximum over
    replicas; and the metrics of all rows. With equal metrics all processes decide alike
    whether the run continues.
    """

    # The next round counts from the shared number, so that steps add up which another
    # replica skips in each round.
    def share(averaged: Any, num_skipped: jax.Array, metrics: Metrics) -> Any:
        average = functools.partial(shards.mean_over, axes=(REPLICA,))
        shared = jax.tree.map(average, averaged)
        most = jax.lax.pmax(num_skipped[0], REPLICA)
        # Every device holds the metrics of one replica, see LocalStep.
        means = microbatches.mean_metrics(packed.all_gather(metrics, REPLICA))
        means["skipped_steps"] = jnp.float32(most)
        own = shared, most[None]
        return jax.tree.map(lambda x: x[0], shared), own, most, means

    return jax.shard_map(
        share,
        mesh=plan.mesh,
        in_specs=(P(REPLICA), P(REPLICA), P()),
        out_specs=(P(), P(REPLICA), P(), P()),
        axis_names={REPLICA},
        check_vma=False,
    )(averaged, num_skipped, metrics)
