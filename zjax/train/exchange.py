"""The mean over replicas of one buffer per step, by codec, with error feedback.

Each device joins local shards into one flat buffer, and exchanges it with the devices
of the other replicas that hold the corresponding shards.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.comm.codecs import Codec, make_codec
from zjax.comm.packed import Errors, compressed_mean, padded_size
from zjax.optim.build import make_message
from zjax.schedule.exchange import Exchanges, Phase
from zjax.settings.schema import Rule
from zjax.sharding.mesh import REPLICA, axes_of
from zjax.sharding.placement import ArrayPlan, pad_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.typing import Params

_EXACT = {make_codec("float32"), make_codec("bfloat16")}
"""Codecs without error feedback."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Averages arrays in the placement of gradients, inside `shard_map` over `replica`.

    Parameters without a gradient are not sent: codecs have no 0, so that these would
    move, and would influence the scales of the remaining parameters.

    Args:
        plan: Plan of a run.
        codec: Wire format of the numbers.
    """

    plan: Plan
    codec: Codec

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the devices of one replica."""
        return tuple(axis for axis in self.plan.mesh.axis_names if axis != REPLICA)

    @property
    def feeds_back(self) -> bool:
        """Whether the quantization error is added to the next message."""
        return self.codec not in _EXACT

    @property
    def rows(self) -> list[ArrayPlan]:
        """Plans of the arrays that are sent."""
        rows = jax.tree.leaves(self.plan.grads)
        return [row for row in rows if row.follows == "gradient"]

    @property
    def num_replicas(self) -> int:
        """Number of replicas that exchange."""
        return self.plan.mesh.shape[REPLICA]

    @property
    def num_elements(self) -> int:
        """Elements of the buffer of a device, padding included."""
        shards = (math.prod(r.stored.shard_shape(r.stored_shape)) for r in self.rows)
        return padded_size(sum(shards), self.codec, self.num_replicas)

    @property
    def error_rows(self) -> Any:
        """Plans of the error feedback: float32[replicas, devices, elements]."""
        mesh, number = self.plan.mesh, self.num_replicas
        place = NamedSharding(mesh, P(REPLICA, self.axes))
        num_devices = math.prod(mesh.shape[axis] for axis in self.axes)

        def row(path: str, size: int) -> Any:
            shape = number, num_devices, size
            return ArrayPlan(path, shape, jnp.dtype("float32"), place, place)

        size = self.num_elements
        return Errors(row("extra/worker", size), row("extra/server", size // number))

    @property
    def _axes_of_copies(self) -> list[set[str]]:
        """Axes along which devices of a replica send one shard in unlike buffers.

        The quantization error of a number depends on all numbers in the buffer.
        """
        split = [{*sum(axes_of(row.spec, len(row.shape)), ())} for row in self.rows]
        unlike = set().union(*split)
        return [unlike - axes for axes in split]

    def __call__(
        self, tree: Params, errors: Any, keep: jax.Array
    ) -> tuple[Params, Any]:
        """Averages arrays in logical shapes over replicas.

        `keep`, bool[], says whether the step counts and new errors replace `errors`.
        Arrays without a gradient come back unchanged.
        """
        leaves, form = jax.tree.flatten(tree)
        is_sent = [r.follows == "gradient" for r in jax.tree.leaves(self.plan.grads)]
        sent = [x for x, is_one in zip(leaves, is_sent, strict=True) if is_one]
        means, new = self._mean(sent, errors if self.feeds_back else (), keep)
        rest = iter(means)
        leaves = [
            next(rest) if is_one else x
            for x, is_one in zip(leaves, is_sent, strict=True)
        ]
        # An exact codec leaves the errors of other phases alone.
        return form.unflatten(leaves), new if self.feeds_back else errors

    def _mean(
        self, sent: list[jax.Array], errors: Any, keep: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        """Averages the arrays that are sent, as one buffer per device."""
        specs = [row.spec for row in self.rows]
        by_device = jax.tree.map(lambda _: P(None, self.axes), errors)

        def of_device(shards: list[jax.Array], errors: Any, keep: jax.Array) -> Any:
            flat = [x.astype(jnp.float32).ravel() for x in shards]
            padding = self.num_elements - sum(x.size for x in flat)
            # One buffer per device: one message in place of one per array.
            buffer = jnp.concatenate([*flat, jnp.zeros(padding, jnp.float32)])
            old = jax.tree.map(jnp.ravel, errors) if errors else None
            mean, new = compressed_mean(buffer, old, self.codec, REPLICA)
            parts, start = [], 0
            for x in shards:
                part = mean[start : start + x.size]
                parts.append(part.reshape(x.shape).astype(x.dtype))
                start += x.size
            # Copies of a shard must stay bitwise equal, though unlike buffers rounded
            # them differently.
            parts = list(map(_of_first_device, parts, self._axes_of_copies))
            kept = jax.tree.map(
                lambda x, e: jnp.where(keep, x.reshape(e.shape), e), new or (), errors
            )
            return parts, kept

        means, errors = jax.shard_map(
            of_device,
            in_specs=(specs, by_device, P()),
            out_specs=(specs, by_device),
            axis_names=set(self.axes),
            check_vma=False,
        )(pad_tree(sent, self.rows), errors, keep)
        return unpad_tree(means, self.rows), errors


def _of_first_device(x: jax.Array, axes: set[str]) -> jax.Array:
    """Broadcasts the array of the first device along some axes."""
    if not axes:
        return x
    order = tuple(sorted(axes))
    return jax.lax.psum(jnp.where(jax.lax.axis_index(order) == 0, x, 0), order)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The message of a phase and the exchange that averages the message over replicas.

    Args:
        phase: Phase, which says the message and the codec.
        exchange: Exchange between replicas.
        message: Function from gradients and optimizer state to the tree that is sent;
            None for the gradients.
    """

    phase: Phase
    exchange: Exchange
    message: Callable[[Any, Any], Any] | None = None

    def norm(self, norm: jax.Array) -> jax.Array:
        """Root mean square of the replicas' norms; not finite if any norm is not."""
        return jnp.sqrt(jax.lax.pmean(norm * norm, REPLICA))


def make_sent(plan: Plan, phase: Phase, rule: Rule) -> Sent:
    """Builds the message of a phase; arrays are sent in the placement of gradients."""
    exchange = Exchange(plan, make_codec(phase.codec))
    return Sent(phase, exchange, make_message(rule, phase))


def error_rows(plan: Plan, exchanges: Exchanges) -> Any:
    """Returns plans of the error feedback of a run; () without feedback."""
    by_phase = (Exchange(plan, make_codec(x.codec)) for x in exchanges.sending)
    return next((each.error_rows for each in by_phase if each.feeds_back), ())
