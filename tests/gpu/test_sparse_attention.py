"""The block-sparse kernels on a Hopper GPU against dense attention in float32."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels.sparse import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    limit_window,
    make_plan,
    sparse_attention,
)

pytestmark = NEEDS_HOPPER
LENGTH, HEADS = 1024, 8
RULES = {
    "bigbird-128": BigBird(HEADS, 128, attention="unidirectional"),
    "bigbird-64-heads": BigBird(HEADS, 64, different_layout_per_head=True),
    "fixed-16": Fixed(HEADS, 16),
    "fixed-32-causal": Fixed(HEADS, 32, attention="unidirectional"),
    "longformer-64": BSLongformer(HEADS, 64),
    "window-16": LocalSlidingWindow(HEADS, 16),
    "dense-128": Dense(HEADS, 128),
}
SIZES, DTYPES, GROUPS = (64, 96, 128, 256), (jnp.bfloat16, jnp.float16), (1, 2, 8)
RULES_AT = {rule: number for number, rule in enumerate(RULES)}
GRID = [*itertools.product(RULES, SIZES, DTYPES, GROUPS)]


def named(case):
    rule, size, dtype, group = case
    often = (RULES_AT[rule] + SIZES.index(size) + DTYPES.index(dtype)) % len(GROUPS)
    marks = [] if GROUPS.index(group) == often else [pytest.mark.slow]
    name = f"{rule}-{size}-{jnp.dtype(dtype).name}-{group}"
    return pytest.param(*case, id=name, marks=marks)


def run(plan, inputs, d_out, **masks):
    def forward(q, k, v):
        return sparse_attention(
            q, k, v, plan, return_lse=True, implementation="mosaic_gpu", **masks
        )

    @jax.jit
    def both(inputs, d_out):
        (out, lse), vjp = jax.vjp(forward, *inputs)
        return out, lse, vjp((d_out, jnp.zeros_like(lse)))

    return both(inputs, d_out)


def assert_close(found, inputs, d_out, mask):
    """Within what 16 bits can tell of sums of numbers of order 1."""
    out, lse, grads = found
    half = inputs[0].dtype == jnp.float16
    exact = [x.astype(jnp.float32) for x in (*inputs, d_out)]
    with jax.default_matmul_precision("highest"):
        (expected, sums), vjp = jax.vjp(lambda *x: attend(*x, mask), *exact[:3])
        expected_grads = vjp((exact[3], jnp.zeros_like(sums)))
    np.testing.assert_allclose(lse, sums, atol=1e-3, rtol=0)
    out = out.astype(jnp.float32)
    np.testing.assert_allclose(out, expected, atol=4e-3 if half else 2e-2)
    for grad, other in zip(grads, expected_grads, strict=True):
        error = jnp.abs(grad.astype(jnp.float32) - other).max() / jnp.abs(other).max()
        assert error <= (2e-3 if half else 1e-2)


@pytest.mark.parametrize(("rule", "size", "dtype", "group"), [*map(named, GRID)])
def test_kernels_are_dense_attention_under_the_mask(rule, size, dtype, group):
    """Fails if any head size, dtype, layout or group is computed wrongly, both ways."""
    layout = RULES[rule].layout(LENGTH)
    plan = make_plan(layout, num_kv_heads=HEADS // group, head_size=size)
    *inputs, d_out, _ = make_inputs(
        layout, num_kv_heads=HEADS // group, head_size=size, dtype=dtype
    )
    assert_close(run(plan, inputs, d_out), inputs, d_out, mask_of(layout))


@pytest.mark.parametrize("size", SIZES)
def test_all_masks_at_once(size):
    """Fails if segments, a mask of keys or one of tokens is not seen by a kernel."""
    layout = BigBird(HEADS, 16, attention="unidirectional").layout(LENGTH)
    rows = np.arange(LENGTH)
    near = rows[:, None] - rows < 300
    plan = make_plan(
        layout,
        num_kv_heads=2,
        head_size=size,
        segments=True,
        mask=lambda query, key: query - key < 300,
    )
    *inputs, d_out, _ = make_inputs(
        layout, num_kv_heads=2, head_size=size, dtype=jnp.bfloat16
    )
    rng = np.random.default_rng(0)
    segments = (np.sort(rng.integers(0, 4, (2, LENGTH))).astype(np.int32),) * 2
    key_mask = rng.random((2, LENGTH)) < 0.9
    found = run(plan, inputs, d_out, segment_ids=segments, key_mask=key_mask)
    mask = mask_of(layout, segments, key_mask) & near
    assert_close(found, inputs, d_out, mask)


@pytest.mark.parametrize("size", SIZES)
def test_a_window_that_grows_is_its_mask(size):
    """Fails if a kernel starts at a wrong chunk, or masks a token too many or few."""
    layout = BigBird(HEADS, 64, attention="unidirectional").layout(LENGTH)
    plan = make_plan(layout, num_kv_heads=2, head_size=size)
    *inputs, d_out, _ = make_inputs(
        layout, num_kv_heads=2, head_size=size, dtype=jnp.bfloat16
    )
    rows = np.arange(LENGTH)
    for window in (17, 100, 640):
        found = run(limit_window(plan, window), inputs, d_out)
        mask = mask_of(layout) & (rows[:, None] - rows < window)
        assert_close(found, inputs, d_out, mask)


def test_long_rows_are_cut_and_two_runs_are_the_same():
    """Fails if parts of a tile are lost, or if anything depends on who is first."""
    layout = BSLongformer(2, 128).layout(2**15)
    plan = make_plan(layout)
    assert plan.queries.num_slots > 0
    *inputs, d_out, _ = make_inputs(layout, batch=1, head_size=128, dtype=jnp.bfloat16)
    first, second = (run(plan, inputs, d_out) for _ in range(2))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)
    exact = [x.astype(jnp.float32) for x in inputs]
    scores = exact[0][0, 5, 0] @ exact[1][0, :, 0].T * 128**-0.5
    row = jax.nn.softmax(scores) @ exact[2][0, :, 0]
    np.testing.assert_allclose(first[0][0, 5, 0].astype(np.float32), row, atol=2e-2)
    np.testing.assert_allclose(first[1][0, 0, 5], jax.nn.logsumexp(scores), atol=1e-3)
    reference = jax.jit(
        lambda *x: sparse_attention(*x, plan, implementation="reference")
    )
    _, vjp = jax.vjp(reference, *inputs)
    for grad, other in zip(first[2], vjp(d_out), strict=True):
        grad, other = (x.astype(jnp.float32) for x in (grad, other))
        assert jnp.abs(grad - other).max() <= 2e-2 * jnp.abs(other).max()


def test_auto_takes_the_kernels():
    layout = BigBird(4, 64).layout(LENGTH)
    plan = make_plan(layout)
    x = jnp.ones((1, LENGTH, 4, 64), jnp.bfloat16)
    text = jax.jit(lambda x: sparse_attention(x, x, x, plan)).lower(x).as_text()
    assert "mosaic_gpu" in text
