"""The portable implementation, the rules of arguments, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live, random_mask
from zjax_kernels.sparse_attention import BlockLayout, make_plan, sparse_attention

CASES = {
    "16": {"block": 16, "rows": 16},
    "16, causal, padded": {"block": 16, "rows": 11, "causal": True},
    "32, groups": {"block": 32, "rows": 8, "num_kv_heads": 2},
    "64, one head of keys, causal": {
        "block": 64,
        "rows": 4,
        "num_kv_heads": 1,
        "causal": True,
    },
    "128, keys longer": {"block": 128, "rows": 2, "columns": 3},
    "64, capped, scaled": {"block": 64, "rows": 4, "soft_cap": 2.0, "scale": 0.7},
    "16, segments": {"block": 16, "rows": 16, "causal": True, "segments": True},
    "64, segments, key mask": {
        "block": 64,
        "rows": 4,
        "segments": True,
        "key_mask": True,
    },
    "32, key mask": {"block": 32, "rows": 8, "key_mask": True, "num_kv_heads": 2},
    "32, mask of tokens": {"block": 32, "rows": 8, "causal": True, "mask": True},
    "all heads alike": {"block": 32, "rows": 8, "alike": True, "num_kv_heads": 2},
}


def make_case(
    *, block, rows, columns=None, causal=False, alike=False, num_kv_heads=None, **rest
):
    live = random_live((rows, columns or rows) if alike else (4, rows, columns or rows))
    if not alike:
        live[3, rows // 2] = False
    layout = BlockLayout.from_dense(live, block=block, num_heads=4, causal=causal)
    options = {name: rest[name] for name in ("scale", "soft_cap") if name in rest}
    masks = {}
    rng = np.random.default_rng(1)
    lengths = rows * block, (columns or rows) * block
    if rest.get("segments"):
        masks["segment_ids"] = tuple(
            np.sort(rng.integers(0, 3, (2, n))) for n in lengths
        )
    if rest.get("key_mask"):
        masks["key_mask"] = rng.random((2, lengths[1])) < 0.8
    return layout, num_kv_heads, options, masks


@pytest.mark.parametrize("case", CASES)
def test_reference_is_dense_attention_under_the_mask(case):
    """Fails if a live pair is left out, a dead one counted, or a gradient is wrong."""
    layout, num_kv_heads, options, masks = make_case(**CASES[case])
    tokens = None
    if CASES[case].get("mask"):
        tokens = random_mask((layout.num_rows * 32, layout.num_columns * 32))
    plan = make_plan(layout, num_kv_heads=num_kv_heads, mask=tokens)
    *inputs, d_out, d_lse = make_inputs(layout, num_kv_heads=num_kv_heads)
    mask = mask_of(layout, masks.get("segment_ids"), masks.get("key_mask"))
    mask &= True if tokens is None else tokens
    found = run(
        lambda *x: sparse_attention(*x, plan, **options, **masks, return_lse=True),
        inputs,
        d_out,
        d_lse,
    )
    expected = run(lambda *x: attend(*x, mask, **options), inputs, d_out, d_lse)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


def run(function, inputs, d_out, d_lse):
    """Averages, log-sum-exps and gradients of inputs; -inf passes no gradient on."""

    def loss(*inputs):
        out, lse = function(*inputs)
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * d_out).sum() + (finite * d_lse).sum(), (out, lse)

    grads, found = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return *found, *grads
