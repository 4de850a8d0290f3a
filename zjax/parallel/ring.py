"""Ring attention: keys and values go around a ring, and partial results merge."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import zjax_kernels
from zjax.ops.attention import ATTENTION_OUTPUT, Implementation
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, row_axes
from zjax_kernels.device import why_unsupported

CHUNK = 1024
"""Most keys with scores in memory at one time."""
BLOCK = 128
"""Tokens per block of the kernels, which take whole blocks."""

Ids = tuple[Int[Array, "B L"], Int[Array, "B S"]] | None
"""Document of each query and key; queries see keys of equal documents. None: all
keys."""


def attend(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    ids: Ids,
    *,
    causal: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B L H D"], Float[Array, "B L H"]]:
    """Averages the values; also returns logarithms of sums of exponentials of scores.

    A query that sees no key gets 0 and -inf. Causal queries and keys have equal
    positions. `implementation="auto"` uses kernels where they run, `"xla"` never.
    """
    if _has_kernel(q, k, implementation):
        plan = _plan(q.shape, k.shape, causal, ids is not None)
        options: Any = {"segment_ids": ids, "return_lse": True}
        out, lse = zjax_kernels.sparse_attention(q, k, v, plan, **options)
        return out, lse.swapaxes(1, 2)
    queries = _group(q, k.shape[2])

    def add(carry: Any, chunk: Any) -> Any:
        top, total, out = carry
        keys, values, mask = chunk
        scores = jnp.where(mask, _scores(queries, keys), -jnp.inf)
        higher = jnp.maximum(top, scores.max(-1))
        # -inf - -inf would be NaN where a query has seen no key yet.
        level = jnp.where(jnp.isneginf(higher), 0.0, higher)
        shrink, p = jnp.exp(top - level), jnp.exp(scores - level[..., None])
        out = out * shrink[..., None] + _dot("blkgs,bskd->blkgd", p, values)
        return (higher, total * shrink + p.sum(-1), out), None

    zeros = jnp.zeros(queries.shape[:-1], jnp.float32)
    start = zeros - jnp.inf, zeros, jnp.zeros(queries.shape, jnp.float32)
    top, total, out = _over_keys(add, start, q, k, v, ids, causal)[0]
    some = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(some))
    out = (out / some[..., None]).astype(q.dtype)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def gradients(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    d_out: Float[Array, "B L H D"],
    lse: Float[Array, "B L H"],
    delta: Float[Array, "B L H"],
    ids: Ids,
    *,
    causal: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B L H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Computes float32 gradients of attention by some of the keys.

    `lse` and `delta` are over all keys: logarithms of the sums of exponentials, and
    sums over D of `d_out` times the averages.
    """
    if _has_kernel(q, k, implementation):
        plan = _plan(q.shape, k.shape, causal, ids is not None)
        sums = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
        dq, dk, dv = zjax_kernels.sparse_attention_gradients(
            q, k, v, plan, d_out, *sums, segment_ids=ids
        )
        return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)
    queries, d_out = (_group(x, k.shape[2]) for x in (q, d_out))
    lse, delta = (x.reshape(*queries.shape[:-1], 1) for x in (lse, delta))

    def add(dq: Any, chunk: Any) -> Any:
        keys, values, mask = chunk
        # Masked after exp: a query that sees no key has lse = -inf.
        p = jnp.where(mask, jnp.exp(_scores(queries, keys) - lse), 0.0)
        ds = p * (_dot("blkgd,bskd->blkgs", d_out, values) - delta)
        ds *= q.shape[-1] ** -0.5
        dk = _dot("blkgs,blkgd->bskd", ds, queries)
        dv = _dot("blkgs,blkgd->bskd", p, d_out)
        return dq + _dot("blkgs,bskd->blkgd", ds, keys), (dk, dv)

    start = jnp.zeros(queries.shape, jnp.float32)
    dq, (dk, dv) = _over_keys(add, start, q, k, v, ids, causal)
    dk, dv = (jnp.moveaxis(x, 0, 1).reshape(k.shape) for x in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _has_kernel(q, k, implementation):
    """Whether the kernels can run; logs the choice."""
    reason = "asked for" if implementation == "xla" else ""
    reason = reason or why_unsupported(q.dtype.name, q.shape[-1])
    odd = [x.shape[1] for x in (q, k) if x.shape[1] % BLOCK]
    if odd and not reason:
        reason = f"{odd[0]} tokens at a time are not whole blocks of {BLOCK}"
    _log("plain JAX" if reason else "kernels", reason or q.dtype.name)
    return not reason


@functools.cache
def _log(chosen, reason):
    """Logs a choice once."""
    logging.warning("ring attention: %s (%s)", chosen, reason)


@functools.cache
def _plan(queries, keys, causal, segments):
    """Plans attention on all blocks."""
    rows, columns = queries[1] // BLOCK, keys[1] // BLOCK
    layout = zjax_kernels.BlockLayout.from_dense(
        np.ones((rows, columns), bool),
        block=BLOCK,
        num_heads=queries[2],
        causal=causal,
    )
    return zjax_kernels.make_plan(
        layout, num_kv_heads=keys[2], head_size=queries[3], segments=segments
    )


def _over_keys(add, carry, q, k, v, ids, causal):
    """Runs `add(carry, (keys, values, mask))` over chunks of keys."""
    length = k.shape[1]
    least = -(-length // CHUNK)
    # Chunks are of equal size: `scan` needs one shape.
    number = next(n for n in range(least, length + 1) if length % n == 0)

    def cut(x):
        shape = x.shape[0], number, length // number, *x.shape[2:]
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def run(carry, chunk):
        keys, values, columns, key_ids = chunk
        mask = jnp.ones((), bool)
        if causal:
            rows = jnp.arange(q.shape[1])[None, :, None]
            mask = columns[:, None, :] <= rows
        if ids is not None:
            mask = mask & (ids[0][:, :, None] == key_ids[:, None, :])
        mask = mask[:, :, None, None, :] if mask.ndim else mask
        return add(carry, (keys, values, mask))

    columns = jnp.arange(length)[None]
    key_ids = columns if ids is None else ids[1]
    return jax.lax.scan(run, carry, tuple(map(cut, (k, v, columns, key_ids))))


def _group(x, num_kv_heads):
    return x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[-1])


def _scores(queries, keys):
    return _dot("blkgd,bskd->blkgs", queries, keys) * keys.shape[-1] ** -0.5


def _dot(equation, x, y):
    """Multiplies in the dtype of `y`, into float32."""
    x = x.astype(y.dtype)
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def zigzag(length: int, num_devices: int) -> Int[np.ndarray, " L"]:
    """Positions of tokens, device by device, in the order of a causal ring.

    Each device has an early and a late chunk, so that causal work is even. `length` is
    a multiple of twice `num_devices`.

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

    Rows are split over the batch axes of the mesh in use, heads over the tensor axis,
    where they divide. Causal tokens are in `zigzag` order; `lengths` count tokens in
    the order of the sequence. A query that sees no key gets 0.

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
    """Program of one device, in as many steps as there are devices."""

    size: int
    causal: bool
    implementation: Implementation

    def options(self, *, causal: bool = False) -> Any:
        """Options of `attend` and `gradients` in a step."""
        return {"causal": causal, "implementation": self.implementation}

    def over_devices(self, run: Any, q: Any, k: Any) -> Any:
        """Maps a program over rows, tokens and heads of the inputs."""
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
        """Attends to the keys of each device in turn, and sends keys forward."""
        q, k, v = arrays
        held: Any = (k, v, _keys_of(ids))
        total: Any = None
        for step in range(self.size):
            # Sent before the step computes, so that transfer and products overlap.
            received = self.send(held, 1) if step + 1 < self.size else None
            k, v, of_keys = held
            total = self.attend(step, total, q, k, v, _with_keys(ids, of_keys))
            # The next send waits for this step, or all keys would arrive at once.
            held, total = jax.lax.optimization_barrier((received, total))
        return total[0].astype(q.dtype), total[1]

    def backward(self, arrays: Any, ids: Any) -> Any:
        """Adds gradients over the keys of each device in turn; sends keys backward."""
        q, k, v, *sums = arrays
        held: Any = (k, v, _keys_of(ids))
        dq: Any = 0.0
        dkv: Any = None
        for step in range(self.size):
            # Sent before the step computes, as in `forward`.
            received = self.send(held, -1) if step + 1 < self.size else None
            own_dq, *own_dkv = self.gradients(
                step, q, *held[:2], sums, _with_keys(ids, held[2])
            )
            dkv = (
                jax.tree.map(jnp.add, self.send(dkv, -1), own_dkv) if step else own_dkv
            )
            held, dq, dkv = jax.lax.optimization_barrier((received, dq + own_dq, dkv))
        # One more step brings key gradients home.
        grads = dq, *self.send(dkv, -1)
        return tuple(x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))

    def send(self, tree: Any, by: int) -> Any:
        """Sends a tree to the device `by` further on."""
        moves = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, meshes.SEQUENCE, moves), tree)

    def attend(self, step: int, total: Any, q: Any, k: Any, v: Any, ids: Any) -> Any:
        """Merges averages over the keys of a step into the averages so far."""
        if step == 0:
            options = self.options(causal=self.causal)
            out, lse = attend(q, k, v, ids, **options)
            # Merged in float32 over all steps.
            return out.astype(jnp.float32), lse
        if not self.causal:
            return _merge(total, attend(q, k, v, ids, **self.options()))
        seen = self.seen(step)
        q, k, v, ids = seen.pairs(q, k, v, ids)
        result = attend(q, k, v, ids, **self.options())
        return seen.add(total, result, LATE, _merge)

    def gradients(self, step: int, q: Any, k: Any, v: Any, sums: Any, ids: Any) -> Any:
        """Computes float32 gradients from the keys of a step."""
        d_out, lse, delta = sums
        if step == 0 or not self.causal:
            options = self.options(causal=self.causal and step == 0)
            return gradients(q, k, v, d_out, lse, delta, ids, **options)
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        # Keys go backward here: after `step` sends they come from `size - step` back.
        seen = self.seen(self.size - step)
        q, k, v, ids = seen.pairs(q, k, v, ids)
        d_out, lse, delta = (seen.pick(x, LATE) for x in sums)
        dq, dk, dv = gradients(q, k, v, d_out, lse, delta, ids, **self.options())
        return (
            seen.add(zeros[0], dq, LATE, jnp.add),
            seen.add(zeros[1], dk, EARLY, jnp.add),
            seen.add(zeros[2], dv, EARLY, jnp.add),
        )

    def seen(self, distance: int) -> "_Seen":
        """Pairs of chunks with the keys of the device `distance` back."""
        return _Seen(jax.lax.axis_index(meshes.SEQUENCE) >= distance)


EARLY, LATE = 0, 1
"""The two chunks of a device in zigzag order."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Two pairs of chunks, each queries and visible keys, on keys of another device.

    Late queries always see early keys. In addition, early queries see the early keys of
    an earlier device, or late queries see the late keys of a later device. The two
    pairs are stacked along the batch.
    """

    is_earlier: jax.Array
    """bool[], whether the keys are of an earlier device."""

    def pairs(self, q: Any, k: Any, v: Any, ids: Any) -> tuple[Any, ...]:
        """Selects the chunks of queries, keys, values and documents that attend."""
        if ids is not None:
            ids = self.pick(ids[0], LATE), self.pick(ids[1], EARLY)
        return self.pick(q, LATE), self.pick(k, EARLY), self.pick(v, EARLY), ids

    def pick(self, x: jax.Array, half: int) -> jax.Array:
        """Stacks the chunk `half` of the first pair on the chunk of the second pair."""
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
        """Selects the early tree for keys of an earlier device, else the late tree."""

        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(self.is_earlier, x, y)

        return jax.tree.map(choose, early, late)


def _split(tree, axis):
    """Splits each array of a tree in two."""
    halves = jax.tree.map(lambda x: tuple(jnp.split(x, 2, axis)), tree)
    return jax.tree.transpose(jax.tree.structure(tree), None, halves)


def _merge(total, result):
    """Merges two averages over different keys, by the logarithms of the sums."""
    (out, lse), (other, other_lse) = total, result
    merged = jnp.logaddexp(lse, other_lse)
    # -inf - -inf would be NaN where a query sees no key at all.
    level = jnp.where(jnp.isneginf(merged), 0.0, merged)
    out = out * jnp.exp(lse - level)[..., None]
    return out + other * jnp.exp(other_lse - level)[..., None], merged


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q: Any, k: Any, v: Any, ids: Any) -> Any:
    """Averages the values; the backward pass runs the ring again."""
    return ring.over_devices(ring.forward, q, k)((q, k, v), ids)[0]


def _attend_forward(ring, q, k, v, ids):
    """Averages the values, and saves the averages and the logarithms of the sums."""
    results = ring.over_devices(ring.forward, q, k)((q, k, v), ids)
    # Saved by policies: recomputation would run the ring again.
    out, lse = (checkpoint_name(x, ATTENTION_OUTPUT) for x in results)
    return out, (q, k, v, ids, out, lse)


def _attend_backward(ring, saved, d_out):
    """Computes the gradients of queries, keys and values around the ring."""
    q, k, v, ids, out, lse = saved
    # FlashAttention's delta: the softmax gradient then needs no pass over all keys.
    delta = jnp.einsum("blhd,blhd->blh", out, d_out, preferred_element_type=jnp.float32)
    arrays = q, k, v, d_out, lse, delta
    return *ring.over_devices(ring.backward, q, k)(arrays, ids), None


_attend.defvjp(_attend_forward, _attend_backward)


def _keys_of(ids):
    return None if ids is None else ids[1]


def _with_keys(ids, of_keys):
    return None if ids is None else (ids[0], of_keys)
