"""Gradients of attention whose keys are elsewhere in part add up to those of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from zjax_kernels.sparse import BlockLayout, make_plan, sparse_attention_gradients

KEYS = 96
LAYOUT = BlockLayout.from_dense(np.ones((3, 6), bool), block=32, num_heads=4)
PART = BlockLayout.from_dense(np.ones((3, 3), bool), block=32, num_heads=4)


def make_masks():
    rng = np.random.default_rng(0)
    documents = np.sort(rng.integers(0, 3, (2, KEYS)))
    segments = documents, np.concatenate([documents, documents], axis=1)
    return segments, rng.random((2, 2 * KEYS)) < 0.8


@pytest.mark.parametrize(
    ("options", "masked"),
    [({}, False), ({"scale": 0.7}, True), ({"soft_cap": 2.0}, True)],
    ids=["plain", "scaled, masks", "capped, masks"],
)
def test_parts_add_up(options, masked):
    """Fails if an option that scores have is none that their gradients have."""
    segments, key_mask = make_masks() if masked else (None, None)
    mask = mask_of(LAYOUT, segments, key_mask)
    q, k, v, d_out, _ = make_inputs(LAYOUT, num_kv_heads=2)
    (out, lse), vjp = jax.vjp(lambda *x: attend(*x, mask, **options), q, k, v)
    expected = vjp((d_out, jnp.zeros_like(lse)))
    delta = jnp.einsum("bshd,bshd->bhs", out, d_out)
    plan = make_plan(PART, num_kv_heads=2)

    def part(keys):
        masks = {}
        if masked:
            masks["segment_ids"] = segments[0], segments[1][:, keys]
            masks["key_mask"] = key_mask[:, keys]
        return sparse_attention_gradients(
            q, k[:, keys], v[:, keys], plan, d_out, lse, delta, **options, **masks
        )

    (dq, *first), (more, *second) = part(slice(KEYS)), part(slice(KEYS, None))
    pairs = zip(first, second, strict=True)
    found = dq + more, *(jnp.concatenate(each, axis=1) for each in pairs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_sums_that_are_no_array_are_refused():
    q, k, v, d_out, sums = make_inputs(PART)
    with pytest.raises(ValueError) as caught:
        sparse_attention_gradients(q, k, v, make_plan(PART), d_out, sums, None)
    assert str(caught.value) == (
        "delta=NoneType is not an array; give one of shape (2, 4, 96)"
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("d_out", (2, 90, 4, 16), (2, 96, 4, 16)),
        ("d_out", (2, 96, 4, 1), (2, 96, 4, 16)),
        ("lse", (2, 4, 90), (2, 4, 96)),
        ("lse", (2, 96, 4), (2, 4, 96)),
        ("delta", (1, 4, 96), (2, 4, 96)),
    ],
)
def test_other_shapes_are_refused(name, shape, expected):
    """Fails if what is missing is filled up, or what is one is repeated."""
    q, k, v, d_out, sums = make_inputs(PART)
    given = {"d_out": d_out, "lse": sums, "delta": sums, name: jnp.zeros(shape)}
    with pytest.raises(ValueError) as caught:
        sparse_attention_gradients(q, k, v, make_plan(PART), **given)
    assert str(caught.value) == (
        f"{name}.shape={shape} is not {expected}, as the queries need; give all queries"
    )
