"""Ring attention: keys and values go around a ring of devices, queries stay.

Each device along the sequence holds some tokens. In each step it attends to the keys
that it holds, sends them to the next device and receives those of the previous one.
Partial results are merged by the logarithms of their softmax sums, in float32. The
backward pass sends keys and values around together with their gradients, until these
are back. It goes in the other direction: in the same one, the compiler merges the two
rings and holds all keys from one pass to the other. Each device holds the keys of two
devices at most.

Under a causal mask, contiguous tokens would leave most devices waiting for the last
one. Tokens are therefore in zigzag order: of twice as many chunks as devices, device i
of n holds chunks i and 2n - 1 - i. Each step then computes two pairs of chunks on every
device, and after the first step nothing that is masked.

Reference: Liu et al. (arXiv:2310.01889); Brandon et al. (arXiv:2311.09431) for the
balance.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from zjax.ops.attention import ATTENTION_OUTPUT, Implementation
from zjax.parallel import blocks
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, row_axes


def zigzag(length: int, num_devices: int) -> Int[np.ndarray, " L"]:
    """The order in which a causal ring holds the tokens of a sequence.

    Args:
        length: Tokens, a multiple of twice `num_devices`.
        num_devices: Devices along the sequence.

    Returns:
        Positions in the sequence, device by device.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    first = np.arange(length).reshape(2 * num_devices, -1)
    pairs = zip(first[:num_devices], first[::-1], strict=False)
    return np.concatenate([chunk for pair in pairs for chunk in pair])


def ring_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    *,
    causal: bool,
    segment_ids: Int[Array, "B L"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B L H D"]:
    """Averages the values by softmax(q k / sqrt(D)) over a split sequence.

    Rows are split over the batch axes of the mesh in use, heads over its tensor axis,
    where they divide.

    Args:
        q: Queries, their length split over the sequence axis, which divides L; H is a
            multiple of K.
        k: Keys.
        v: Values.
        causal: Whether a query sees no later key; tokens are then in `zigzag` order.
        segment_ids: Document of each token, 0 or more; documents do not see each other.
        lengths: Tokens per row, in the order of the sequence; later ones are padding.
        implementation: `auto` uses kernels where they run, `xla` never.

    Returns:
        One average per query and head, in the dtype of `q`; 0 where a query sees no
        key.

    Reference:
        Liu et al. (arXiv:2310.01889).
    """
    size = open_size(meshes.SEQUENCE)
    order = zigzag(q.shape[1], size) if causal else np.arange(q.shape[1])
    ids = _documents(segment_ids, lengths, order, q.shape[:2])
    return _attend(_Ring(size, causal, implementation), q, k, v, ids)


def _documents(segment_ids, lengths, order, shape):
    """Documents of queries and of keys; -1 and -2 for padding, which sees nothing."""
    if lengths is None:
        return None if segment_ids is None else (segment_ids, segment_ids)
    ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else segment_ids
    inside = jnp.asarray(order, lengths.dtype)[None] < lengths[:, None]
    return jnp.where(inside, ids, -1), jnp.where(inside, ids, -2)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The program of one device, in as many steps as there are devices."""

    size: int
    causal: bool
    implementation: Implementation

    def options(self, *, causal: bool = False) -> Any:
        return {"causal": causal, "implementation": self.implementation}

    def over_devices(self, run: Any, q: Any, k: Any) -> Any:
        """Maps a program over rows, tokens and heads of its inputs."""
        tensor = open_size(meshes.TENSOR)
        heads = meshes.TENSOR if tensor > 1 and k.shape[2] % tensor == 0 else None
        tokens = P(row_axes(q.shape[0]), meshes.SEQUENCE)
        spec = P(*tokens, heads)
        return jax.shard_map(
            run,
            in_specs=(spec, tokens),
            out_specs=spec,
            axis_names=set(jax.sharding.get_abstract_mesh().auto_axes),
            check_vma=False,
        )

    def forward(self, arrays: Any, ids: Any) -> Any:
        q, k, v = arrays
        held: Any = (k, v, _keys_of(ids))
        total: Any = None
        for step in range(self.size):
            received = self.send(held, 1) if step + 1 < self.size else None
            k, v, of_keys = held
            total = self.attend(step, total, q, k, v, _with_keys(ids, of_keys))
            # The next send waits for this step, or all keys would arrive at once.
            held, total = jax.lax.optimization_barrier((received, total))
        return total[0].astype(q.dtype), total[1]

    def backward(self, arrays: Any, ids: Any) -> Any:
        q, k, v, *sums = arrays
        held: Any = (k, v, _keys_of(ids))
        dq: Any = 0.0
        dkv: Any = None
        for step in range(self.size):
            received = self.send(held, -1) if step + 1 < self.size else None
            own_dq, *own_dkv = self.gradients(
                step, q, *held[:2], sums, _with_keys(ids, held[2])
            )
            dkv = (
                jax.tree.map(jnp.add, self.send(dkv, -1), own_dkv) if step else own_dkv
            )
            held, dq, dkv = jax.lax.optimization_barrier((received, dq + own_dq, dkv))
        grads = dq, *self.send(dkv, -1)
        return tuple(x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))

    def send(self, tree: Any, by: int) -> Any:
        """Sends to the device `by` further on."""
        moves = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, meshes.SEQUENCE, moves), tree)

    def attend(self, step: int, total: Any, q: Any, k: Any, v: Any, ids: Any) -> Any:
        """Merges averages over the keys of a step into those of the steps before."""
        if step == 0:
            options = self.options(causal=self.causal)
            out, lse = blocks.attend(q, k, v, ids, **options)
            return out.astype(jnp.float32), lse
        if not self.causal:
            return _merge(total, blocks.attend(q, k, v, ids, **self.options()))
        seen = self.seen(step)
        q, k, v, ids = seen.pairs(q, k, v, ids)
        result = blocks.attend(q, k, v, ids, **self.options())
        return seen.add(total, result, LATE, _merge)

    def gradients(self, step: int, q: Any, k: Any, v: Any, sums: Any, ids: Any) -> Any:
        """Gradients from the keys of a step, float32."""
        d_out, lse, delta = sums
        if step == 0 or not self.causal:
            options = self.options(causal=self.causal and step == 0)
            return blocks.gradients(q, k, v, d_out, lse, delta, ids, **options)
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        seen = self.seen(self.size - step)
        q, k, v, ids = seen.pairs(q, k, v, ids)
        d_out, lse, delta = (seen.pick(x, LATE) for x in sums)
        dq, dk, dv = blocks.gradients(q, k, v, d_out, lse, delta, ids, **self.options())
        return (
            seen.add(zeros[0], dq, LATE, jnp.add),
            seen.add(zeros[1], dk, EARLY, jnp.add),
            seen.add(zeros[2], dv, EARLY, jnp.add),
        )

    def seen(self, distance: int) -> "_Seen":
        """The pairs of chunks with the keys of the device `distance` back."""
        return _Seen(jax.lax.axis_index(meshes.SEQUENCE) >= distance)


EARLY, LATE = 0, 1
"""The two chunks of a device in zigzag order."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The two pairs of chunks that attend to each other, on keys of another device.

    Late queries always see early keys. In addition, early queries see the early keys of
    an earlier device, or late queries see the late keys of a later device. The two
    pairs are stacked along the batch.
    """

    is_earlier: jax.Array
    """bool[], whether the keys are of an earlier device."""

    def pairs(self, q: Any, k: Any, v: Any, ids: Any) -> tuple[Any, ...]:
        if ids is not None:
            ids = self.pick(ids[0], LATE), self.pick(ids[1], EARLY)
        return self.pick(q, LATE), self.pick(k, EARLY), self.pick(v, EARLY), ids

    def pick(self, x: jax.Array, half: int) -> jax.Array:
        halves = jnp.split(x, 2, axis=1)
        return jnp.concatenate([halves[half], self._select(*halves)])

    def add(self, total: Any, result: Any, half: int, add: Any) -> Any:
        """Adds results for the chunks of `pick` to totals over both chunks."""
        halves = list(_split(total, 1))
        first, second = _split(result, 0)
        halves[half] = add(halves[half], first)
        both = add(self._select(*halves), second)
        halves = self._select(both, halves[EARLY]), self._select(halves[LATE], both)
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *halves)

    def _select(self, early: Any, late: Any) -> Any:
        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(self.is_earlier, x, y)

        return jax.tree.map(choose, early, late)


def _split(tree, axis):
    halves = jax.tree.map(lambda x: tuple(jnp.split(x, 2, axis)), tree)
    return jax.tree.transpose(jax.tree.structure(tree), None, halves)


def _merge(total, result):
    (out, lse), (other, other_lse) = total, result
    merged = jnp.logaddexp(lse, other_lse)
    level = jnp.where(jnp.isneginf(merged), 0.0, merged)
    out = out * jnp.exp(lse - level)[..., None]
    return out + other * jnp.exp(other_lse - level)[..., None], merged


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q: Any, k: Any, v: Any, ids: Any) -> Any:
    return ring.over_devices(ring.forward, q, k)((q, k, v), ids)[0]


def _attend_forward(ring, q, k, v, ids):
    results = ring.over_devices(ring.forward, q, k)((q, k, v), ids)
    out, lse = (checkpoint_name(x, ATTENTION_OUTPUT) for x in results)
    return out, (q, k, v, ids, out, lse)


def _attend_backward(ring, saved, d_out):
    q, k, v, ids, out, lse = saved
    delta = jnp.einsum("blhd,blhd->blh", out, d_out, preferred_element_type=jnp.float32)
    arrays = q, k, v, d_out, lse, delta
    return *ring.over_devices(ring.backward, q, k)(arrays, ids), None


_attend.defvjp(_attend_forward, _attend_backward)


def _keys_of(ids):
    return None if ids is None else ids[1]


def _with_keys(ids, of_keys):
    return None if ids is None else (ids[0], of_keys)
