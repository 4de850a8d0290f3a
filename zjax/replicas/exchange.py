"""The mean over replicas of one buffer per step, by codec, with error feedback.

Each device joins local shards into one flat buffer, and exchanges it with the devices
of the other replicas that hold the corresponding shards.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.ops.codecs import Codec, make_codec
from zjax.ops.packed import Errors, compressed_mean, padded_size
from zjax.replicas.fragments import Fragment, make_fragments, whole_fragment
from zjax.schedule.exchange import Exchanges
from zjax.sharding.mesh import REPLICA, axes_of
from zjax.sharding.placement import ArrayPlan, pad_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.typing import Params

EXACT = {make_codec("float32"), make_codec("bfloat16")}
"""Codecs without error feedback."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Averages a fragment, inside `shard_map` over `replica`.

    Args:
        rows: Plans of the sent arrays; each device sends the stored shards.
        codec: Wire format of the numbers.
    """

    mesh: Mesh | AbstractMesh
    fragment: Fragment
    rows: Sequence[ArrayPlan]
    codec: Codec

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the devices of one replica."""
        return tuple(axis for axis in self.mesh.axis_names if axis != REPLICA)

    @property
    def feeds_back(self) -> bool:
        """Whether the quantization error is added to the next message."""
        return self.codec not in EXACT

    @property
    def num_replicas(self) -> int:
        """Number of replicas that exchange."""
        return self.mesh.shape[REPLICA]

    @property
    def num_elements(self) -> int:
        """Elements of the buffer of a device, padding included."""
        shards = (math.prod(r.stored.shard_shape(r.stored_shape)) for r in self.rows)
        return padded_size(sum(shards), self.codec, self.num_replicas)

    @property
    def error_rows(self) -> Any:
        """Plans of the error feedback: float32[replicas, devices, elements]."""
        mesh, number = self.mesh, self.num_replicas
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
        """Averages the arrays of a tree that the fragment holds, in logical shapes."""
        leaves, form = jax.tree.flatten(tree)
        means, errors = self.mean(self.fragment.take(leaves), errors, keep)
        return form.unflatten(self.fragment.put(leaves, means)), errors

    def mean(
        self, sent: list[jax.Array], errors: Any, keep: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        """Averages the arrays that are sent, as one buffer per device.

        `keep`, bool[], says whether the step counts and new errors replace `errors`.
        """
        specs = [row.spec for row in self.rows]
        # An exact codec leaves the errors of other phases alone.
        unused, errors = ((), errors) if self.feeds_back else (errors, ())
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
        return unpad_tree(means, self.rows), errors if self.feeds_back else unused


def _of_first_device(x: jax.Array, axes: set[str]) -> jax.Array:
    """Broadcasts the array of the first device along some axes."""
    if not axes:
        return x
    order = tuple(sorted(axes))
    return jax.lax.psum(jnp.where(jax.lax.axis_index(order) == 0, x, 0), order)


def map_replicas(
    run: Callable[..., Any], mesh: Mesh | AbstractMesh, ins: Any, outs: Any
) -> Callable[..., Any]:
    """Maps a function over replicas, by the specs of inputs and outputs."""
    # The remaining axes stay with the compiler, which shards each replica.
    axes = {"axis_names": {REPLICA}, "check_vma": False}
    return jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, **axes)


def exchanges_by_program(plan: Plan, exchanges: Exchanges) -> dict[str, Exchange]:
    """Returns the exchanges of a run by the name of the program that averages."""
    # With local steps all exchanges send the shards in which master weights are stored:
    # messages of a step and outer gradients share errors. No weights are held frozen
    # then, so that gradients have the tree of the master weights.
    masters = jax.tree.leaves(plan.master)
    rows = masters if exchanges.steps_apart else jax.tree.leaves(plan.grads)
    whole = whole_fragment(rows)
    found = {
        phase.program: Exchange(
            plan.mesh, whole, whole.take(rows), make_codec(phase.codec)
        )
        for phase in exchanges.sending
    }
    if exchanges.outer_codec is not None:
        codec = make_codec(exchanges.outer_codec)
        fragments = make_fragments(plan.master, exchanges.num_fragments)
        for i, each in enumerate(fragments):
            rows = each.rows(masters)
            found[f"mean_{i}"] = Exchange(plan.mesh, each, rows, codec)
    return found
