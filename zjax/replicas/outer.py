"""Outer steps: replicas exchange the distance that each moved in local steps.

The outer gradients of a fragment are the anchor (the parameters shared last) minus the
replica's parameters. A second program averages outer gradients, and a third program
applies the mean to the anchor and to the replicas.

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

from zjax.ops import packed, shards
from zjax.optim.transforms import nesterov
from zjax.replicas.exchange import Exchange, map_replicas
from zjax.replicas.fragments import EXCHANGED
from zjax.schedule.exchange import Phase
from zjax.settings.schema import LocalSteps
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan, pad_tree, place_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.roles import with_followers
from zjax.train import microbatches
from zjax.train.state import TrainState
from zjax.typing import Metrics


@dataclasses.dataclass(frozen=True, eq=False)
class OuterStep:
    """One exchange of a fragment between replicas; pure functions of arrays."""

    exchange: Exchange
    plan: Plan
    settings: LocalSteps

    def outer_gradients(self, anchor: Any, replicas: TrainState) -> list[jax.Array]:
        """Subtracts each replica's parameters from the anchor: float32[N, ...]."""
        fragment = self.exchange.fragment
        start = fragment.take(jax.tree.leaves(anchor))
        end = fragment.take(jax.tree.leaves(replicas.master), dim=1)
        return [
            a.astype(jnp.float32)[None] - x.astype(jnp.float32)
            for a, x in zip(start, end, strict=True)
        ]

    def mean(self, grads: list[jax.Array], errors: Any) -> tuple[list[jax.Array], Any]:
        """Averages outer gradients over replicas, with the fragment's error feedback.

        The mean has equal bits on every replica.
        """

        def of_replica(grads: list[jax.Array], errors: Any) -> Any:
            own, exchange = [g[0] for g in grads], self.exchange
            mean, errors = exchange.mean(own, errors, jnp.bool_(True))
            masters = jax.tree.leaves(self.plan.master)
            whole = (masters[piece.leaf] for piece in exchange.fragment.pieces)
            return list(map(_without_padding, mean, exchange.rows, whole)), errors

        specs = (P(REPLICA), P(REPLICA)), (P(), P(REPLICA))
        return map_replicas(of_replica, self.plan.mesh, *specs)(grads, errors)

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
        settings, fragment = self.settings, self.exchange.fragment
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
    """An outer step that the optimizer of the replicas takes, as in 0/1 Adam."""

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
        mean = tree.unflatten(self.exchange.fragment.put(zeros, grads))
        rows = self.plan.master
        specs = (P(), P(REPLICA), P()), (P(), P(REPLICA), P(REPLICA))
        merge = map_replicas(self._merge, self.plan.mesh, *specs)
        shared, master, opt_state = merge(anchor, replicas.opt_state, mean)
        anchor = with_followers(shared, anchor, rows, EXCHANGED)
        master = with_followers(master, replicas.master, rows, EXCHANGED)
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


def end_of_round(
    averaged: Any, num_skipped: jax.Array, metrics: Metrics, *, plan: Plan
) -> tuple[Any, Any, Any, Metrics]:
    """Shares, at the end of a round, all arrays that no fragment holds.

    `averaged` has the arrays of `zjax.replicas.state.averaged_at_ends`, [N, ...], and
    `num_skipped` is int32[N]. Returns the means of `averaged`; the means and
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
        # Every device holds the metrics of one replica, see ReplicaStep.apart.
        means = microbatches.mean_metrics(packed.all_gather(metrics, REPLICA))
        means["skipped_steps"] = jnp.float32(most)
        own = shared, most[None]
        return jax.tree.map(lambda x: x[0], shared), own, most, means

    specs = (P(REPLICA), P(REPLICA), P()), (P(), P(REPLICA), P(), P())
    return map_replicas(share, plan.mesh, *specs)(averaged, num_skipped, metrics)
