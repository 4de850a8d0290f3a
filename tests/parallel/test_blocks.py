"""Parts of attention, by plain JAX and by the kernels' program, add up to the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import attention
from zjax.parallel import ring

LENGTH, HEADS, KV_HEADS, SIZE = 256, 4, 2, 8


def make_arrays():
    rng = np.random.default_rng(0)
    shapes = [(1, LENGTH, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.fixture(params=["plain JAX", "kernels"])
def program(request, monkeypatch):
    """Kernels run as their reference here, from the same plans."""
    ran = []
    if request.param == "kernels":
        monkeypatch.setattr(ring, "why_unsupported", lambda *_: "")
    monkeypatch.setattr(ring, "_log", lambda chosen, reason: ran.append(chosen))
    yield
    assert set(ran) == {request.param}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_a_part_is_attention_with_its_sums(program, causal, packed):
    q, k, v, d_out = make_arrays()
    seen = np.tri(LENGTH, dtype=bool) if causal else np.ones((LENGTH, LENGTH), bool)
    ids = None
    if packed:
        rng = np.random.default_rng(1)
        queries, keys = (np.sort(rng.integers(0, 5, LENGTH)) for _ in range(2))
        queries[-3:] = 7  # in no document of the keys
        seen = seen & (queries[:, None] == keys)
        ids = tuple(jnp.array(x[None], jnp.int32) for x in (queries, keys))
    out, lse = ring.attend(q, k, v, ids, causal=causal)
    expected, gradients = attention.attend_with_gradients(
        *(q, k, v), np.broadcast_to(seen, (1, LENGTH, LENGTH)), d_out
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    blind = ~seen.any(1)
    assert blind.any() == packed
    assert np.isneginf(np.asarray(lse)[0, blind]).all()
    assert np.isfinite(np.asarray(lse)[0, ~blind]).all()
    delta = jnp.einsum("blhd,blhd->blh", out, d_out)
    found = ring.gradients(q, k, v, d_out, lse, delta, ids, causal=causal)
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_parts_add_up(program):
    """By the sums over all keys, of which each part has a half."""
    q, k, v, d_out = make_arrays()
    out, lse = ring.attend(q, k, v, None, causal=False)
    delta = jnp.einsum("blhd,blhd->blh", out, d_out)
    whole = ring.gradients(q, k, v, d_out, lse, delta, None, causal=False)
    half = LENGTH // 2
    parts = [
        ring.gradients(q, k[:, s], v[:, s], d_out, lse, delta, None, causal=False)
        for s in (slice(half), slice(half, LENGTH))
    ]
    np.testing.assert_allclose(
        parts[0][0] + parts[1][0], whole[0], rtol=1e-4, atol=1e-5
    )
    for index in (1, 2):
        joined = np.concatenate([part[index] for part in parts], axis=1)
        np.testing.assert_allclose(joined, whole[index], rtol=1e-4, atol=1e-5)


def test_parts_of_odd_length_run_in_plain_jax(monkeypatch):
    said = []
    monkeypatch.setattr(ring, "why_unsupported", lambda *_: "")
    monkeypatch.setattr(ring, "_log", lambda *words: said.append(words))
    q, k, v, _ = (x[:, :100] for x in make_arrays())
    ring.attend(q, k, v, None, causal=True)
    reason = "100 tokens at a time are not whole blocks of 128"
    assert said == [("plain JAX", reason)]
