"""Sums of gradients over microbatches, which may be stored outside of the devices."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config.schema import Config
from zjax.offload.backward import GroupGradients
from zjax.offload.compiled import Jit
from zjax.offload.groups import by_group
from zjax.offload.stream import Load, Stream
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import offload_pending
from zjax.storage.move import store
from zjax.train.gradients import weighting
from zjax.typing import Loss, Params


class GradientSums:
    """Adds gradients up group by group, weighted by the weights of microbatches.

    `groups` has the group of each gradient, 0 to num_groups - 1, and `grad_rows` its
    plan on the devices.
    """

    def __init__(
        self,
        groups: Sequence[int],
        grad_rows: Any,
        config: Config,
        num_microbatches: int,
        *,
        num_groups: int,
        limit_bytes: int,
        jit: Jit,
    ):
        self.num_microbatches = num_microbatches
        self.stream = Stream(limit_bytes)
        memory = config.zero.gradient_memory
        rows = [offload_pending(x, memory, config) for x in jax.tree.leaves(grad_rows)]
        pairs = zip(rows, groups, strict=True)
        self.rows: list[list[ArrayPlan]] = by_group(pairs, num_groups)
        self._scale = jit(_scaled)
        self._add = jit(_add, donate_argnums=0)
        self._mean = jit(_mean, donate_argnums=0)
        self.mean_loss = jit(_mean_loss)

    def add(
        self,
        sums: dict[int, list[Any]],
        arriving: Iterator[GroupGradients],
        weights: list[jax.Array],
    ) -> Iterator[GroupGradients]:
        """Adds the gradients of a microbatch; in the last, yields their means.

        `sums` are the stored sums so far by group, in the order of arrival, and
        `weights` the weights of all microbatches so far.
        """
        is_first, is_last = not sums, len(weights) == self.num_microbatches
        self.stream.prefetch(
            Load(group, sums.pop(group), self.rows[group], is_consumed=True)
            for group in list(sums)
        )
        for group, grads, params in arriving:
            if is_first:
                sums[group] = store(self._scale(grads, weights[0]), self.rows[group])
                continue
            total, num_bytes = self.stream.wait(group)
            total = self._add(total, grads, weights[-1])
            if is_last:
                total = self._mean(total, weights)
            else:
                sums[group] = total = store(total, self.rows[group])
            self.stream.release(num_bytes, total)
            if is_last:
                yield GroupGradients(group, total, params)


def _scaled(grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(lambda g: weighting.scaled(g, weight), grads)


def _add(total: Params, grads: Params, weight: jax.Array) -> Params:
    return jax.tree.map(jnp.add, total, _scaled(grads, weight))


def _mean(total: Params, weights: list[jax.Array]) -> Params:
    whole = sum(weights)
    return _scaled(total, 1 / jnp.where(whole == 0, 1, whole))


def _mean_loss(losses: list[Loss]) -> Loss:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *losses)
    return weighting.mean_loss(stacked, ())
