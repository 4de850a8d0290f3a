"""The portable implementation, the rules of arguments, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live, random_mask
from tests.support.refusals import value_error
from zjax_kernels.sparse import BigBird, BlockLayout, make_plan, sparse_attention

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
    "32, eight heads on one of keys": {
        "block": 32,
        "rows": 4,
        "heads": 8,
        "num_kv_heads": 1,
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
    *,
    block,
    rows,
    columns=None,
    causal=False,
    alike=False,
    heads=4,
    num_kv_heads=None,
    **rest,
):
    shape = rows, columns or rows
    live = random_live(shape if alike else (heads, *shape))
    if not alike:
        live[3, rows // 2] = False
    layout = BlockLayout.from_dense(live, block=block, num_heads=heads, causal=causal)
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
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def run(function, inputs, d_out, d_lse):
    """Averages, log-sum-exps and gradients of inputs; -inf passes no gradient on."""

    def loss(*inputs):
        out, lse = function(*inputs)
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * d_out).sum() + (finite * d_lse).sum(), (out, lse)

    grads, found = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return *found, *grads


LAYOUT = BlockLayout.from_dense(np.tri(4, dtype=bool), block=16, num_heads=4)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype):
    """Fails if numbers are rounded to integers or lose their imaginary parts."""
    x = jnp.zeros((1, 64, 4, 8), dtype)
    with value_error(
        f"q.dtype={dtype} is not a supported dtype; cast to one of "
        "bfloat16, float16, float32, float64"
    ):
        sparse_attention(x, x, x, make_plan(LAYOUT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": (1, 60, 4, 64)},
            "q.shape=(1, 60, 4, 64) is not (1, 64, 4, 64), as the plan needs; "
            "make a plan for this length and these heads, or pad the sequence",
        ),
        (
            {"k": (1, 64, 4, 64)},
            "k.shape=(1, 64, 4, 64) is not (1, 64, 2, 64), as the plan needs; "
            "make a plan for this length and these heads, or pad the sequence",
        ),
        (
            {"v": (2, 64, 2, 64)},
            "v.shape=(2, 64, 2, 64) is not (1, 64, 2, 64), as the plan needs; "
            "make a plan for this length and these heads, or pad the sequence",
        ),
        (
            {"dtype": jnp.float16},
            "k.dtype=float16 differs from that of q, bfloat16; cast all to bfloat16",
        ),
        (
            {"scale": -1.0},
            "scale=-1.0 is not above 0 and finite; give one like 0.125, or none",
        ),
        (
            {"scale": "big"},
            "scale='big' is not a real number; give one like 0.125, or none",
        ),
        (
            {"q": (0, 64, 4, 64)},
            "q.shape=(0, 64, 4, 64) has an empty batch or no channels; give one or "
            "more of both",
        ),
        (
            {"soft_cap": float("nan")},
            "soft_cap=nan is not 0 or above and finite; give one like 50, or 0",
        ),
        (
            {"segment_ids": np.zeros((1, 64), np.int32)},
            "segment_ids=ndarray is not a pair; give two, of the queries and of the "
            "keys",
        ),
        (
            {"segment_ids": (np.zeros((1, 64)),) * 2},
            "segment_ids.dtype=float64 is not an integer dtype; number the documents",
        ),
        (
            {"key_mask": np.zeros((1, 64))},
            "key_mask.dtype=float64 is not bool; give True for keys that are seen",
        ),
        (
            {"segment_ids": (np.zeros((1, 8), np.int32),) * 2},
            "segment_ids.shape=((1, 8), (1, 8)) does not fit queries of shape (1, 64) "
            "and keys of shape (1, 64); give one number per token",
        ),
        (
            {"key_mask": np.ones((2, 64), bool)},
            "key_mask.shape=(2, 64) does not fit keys of shape (1, 64); give one per "
            "key",
        ),
    ],
)
def test_refusals(changes, message):
    shapes = {"q": (1, 64, 4, 64), "k": (1, 64, 2, 64), "v": (1, 64, 2, 64)}
    dtype = changes.pop("dtype", jnp.bfloat16)
    arrays = [
        jnp.zeros(changes.pop(name, shape), dtype if name == "k" else jnp.bfloat16)
        for name, shape in shapes.items()
    ]
    with value_error(message):
        sparse_attention(*arrays, make_plan(LAYOUT, num_kv_heads=2), **changes)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("q", [[1.0]], "q=list is not an array"),
        ("k", None, "k=NoneType is not an array"),
        ("v", jnp.float32(1.0), "v.shape=() does not have 4 dims"),
    ],
    ids=["list", "none", "number"],
)
def test_what_is_no_array_or_no_plan_is_refused(name, given, problem):
    arrays = dict.fromkeys("qkv", jnp.zeros((1, 64, 4, 8)))
    shape = "[batch, tokens, heads, channels]"
    with value_error(f"{problem}; give one of shape {shape}"):
        sparse_attention(**arrays | {name: given}, plan=make_plan(LAYOUT))
    with value_error("plan=BlockLayout is not a plan; give make_plan(layout)"):
        sparse_attention(**arrays, plan=LAYOUT)


def test_a_traced_scale_is_refused():
    """Fails if the error is one of tracing, which does not name the argument."""
    x, plan = jnp.zeros((1, 64, 4, 8)), make_plan(LAYOUT)
    with value_error("scale=... is traced; give a number known before compilation"):
        jax.jit(lambda scale: sparse_attention(x, x, x, plan, scale=scale))(0.5)


def test_segments_and_masks_of_keys_may_be_lists():
    x = jax.random.normal(jax.random.key(0), (1, 64, 4, 8))
    ids, seen = np.arange(64)[None] // 20, np.arange(64)[None] % 3 > 0
    plan = make_plan(LAYOUT)
    expected = sparse_attention(x, x, x, plan, segment_ids=(ids, ids), key_mask=seen)
    ids, seen = ids.tolist(), seen.tolist()
    found = sparse_attention(x, x, x, plan, segment_ids=(ids, ids), key_mask=seen)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("head_size", "options", "message"),
    [
        (
            256,
            {},
            "head_size=256 does not fit the plan, which is for up to 128 channels; use "
            "make_plan(..., head_size=256), or at most 128 channels with "
            "make_selected_plan",
        ),
        (
            64,
            {"key_mask": np.ones((1, 64), bool)},
            "segment_ids or key_mask=... cannot be used with the plan, which gathers "
            "blocks one by one; use make_plan(..., segments=True)",
        ),
    ],
)
def test_plans_that_the_kernels_cannot_run(on_hopper, head_size, options, message):
    x = jnp.zeros((1, 64, 4, head_size), jnp.bfloat16)
    with value_error(message):
        sparse_attention(x, x, x, make_plan(LAYOUT), **options)


@pytest.mark.parametrize(
    ("number", "dtype", "library"),
    [
        (2**32, "int64", np),
        (-(2**31), "int64", np),
        (2**31, "uint32", jnp),
        (-(2**31), "int32", jnp),
    ],
)
@pytest.mark.parametrize("wrap", [lambda run: run, jax.jit], ids=["eager", "compiled"])
def test_documents_that_int32_has_no_number_for(number, dtype, library, wrap):
    """Fails if documents see each other, or keys that are hidden are seen."""
    ids = library.asarray([[0] * 32 + [number] * 32], dtype)
    x, plan = jnp.zeros((1, 64, 4, 8)), make_plan(LAYOUT)

    def run(x):
        return sparse_attention(x, x, x, plan, segment_ids=(ids, ids))

    with pytest.raises(ValueError) as caught:
        wrap(run)(x)
    ends = min(0, number), max(0, number)
    assert str(caught.value) == (
        f"segment_ids={ends} is not from -2147483647 to 2147483647; number the "
        "documents from 0"
    )


def test_rows_without_keys_are_zero():
    """Fails if an empty row is NaN, or passes a gradient on."""
    live = np.eye(4, dtype=bool)
    live[2] = False
    layout = BlockLayout.from_dense(live, block=32, num_heads=2)
    *inputs, d_out, _ = make_inputs(layout)
    plan = make_plan(layout)

    def run(*inputs):
        return sparse_attention(*inputs, plan, return_lse=True)

    (out, lse), vjp = jax.vjp(run, *inputs)
    assert not out[:, 64:96].any()
    assert np.isneginf(lse[:, :, 64:96]).all()
    grads = vjp((d_out, jnp.where(jnp.isneginf(lse), jnp.nan, 0.0)))
    for grad in grads:
        assert not grad[:, 64:96].any()
        assert jnp.isfinite(grad).all()


def test_the_future_does_not_leak():
    """Fails if a token of a causal layout sees a later one."""
    layout = BigBird(4, block=32, attention="unidirectional").layout(256)
    plan = make_plan(layout)
    q, k, v, *_ = make_inputs(layout, batch=1)
    found = sparse_attention(q, k, v, plan)
    k, v = (x.at[:, 100:].add(3.0) for x in (k, v))
    changed = sparse_attention(q, k, v, plan)
    np.testing.assert_array_equal(found[:, :100], changed[:, :100])
    assert (found[:, 100:] != changed[:, 100:]).any(axis=(0, 2, 3)).all()


def test_batches_of_batches():
    """Fails if a mapped batch takes another's rows."""
    layout = BlockLayout.from_dense(random_live((4, 8, 8)), block=32)
    plan = make_plan(layout, num_kv_heads=2)
    *inputs, _, _ = make_inputs(layout, num_kv_heads=2)
    mapped = jax.vmap(lambda *x: sparse_attention(*x, plan))
    several = (jnp.stack([x, 2 * x]) for x in inputs)
    expected = sparse_attention(*inputs, plan)
    np.testing.assert_allclose(mapped(*several)[0], expected, atol=1e-6)


def test_keys_that_none_sees_are_of_no_document():
    """Fails if a query of document -1, as padding has, sees keys that are hidden."""
    layout = BlockLayout.from_dense(np.ones((2, 2), bool), block=32, num_heads=2)
    *inputs, _, _ = make_inputs(layout)
    nowhere = jnp.full((2, 64), -1)
    out = sparse_attention(
        *inputs,
        make_plan(layout),
        segment_ids=(nowhere, nowhere),
        key_mask=jnp.zeros((2, 64), bool),
    )
    assert not out.any()


def test_what_no_row_of_a_tile_sees_may_be_anything():
    """Fails if places of a chunk that stay empty read what nobody asked for."""
    live = np.eye(4, dtype=bool)
    layout = BlockLayout.from_dense(live, block=128, num_heads=2)
    q, k, v, *_ = make_inputs(layout, batch=1)
    k, v = (x.at[:, :128].set(jnp.nan) for x in (k, v))
    out = sparse_attention(q, k, v, make_plan(layout))
    assert jnp.isfinite(out[:, 128:]).all()
