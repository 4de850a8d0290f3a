import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.reference import attention as reference
from tests.support.lowering import num_kernels
from tests.support.refusals import config_error
from zjax.errors import ConfigError
from zjax.jaxprs.flops import Flops, count_flops
from zjax.ops import attention
from zjax.ops.explicit_attention import Dropout, explicit_attention, score_bytes
from zjax.ops.sparse import Window
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax_kernels import abstract
from zjax_kernels import device as kernels

RNG = np.random.default_rng(0)
ROWS, LENGTH, HEADS, SIZE = 2, 6, 4, 8
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], np.int32)
LENGTHS = np.array([4, 6], np.int32)
MASK = RNG.random((ROWS, LENGTH, LENGTH)) < 0.6
CAUSAL = reference.causal(ROWS, LENGTH)
SAME = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
EVERY = np.ones_like(CAUSAL)
NEAR = ~np.tri(LENGTH, LENGTH, -3, dtype=bool)[None]
EYE = np.eye(LENGTH, dtype=bool)[None]

attend = jax.jit(attention.dot_product_attention, static_argnames=("causal", "bounds"))

H100 = {
    "platform": "cuda",
    "compute_capability": (9, 0),
    "dtype": "bfloat16",
    "head_size": 64,
    "lengths": (8, 8),
    "masked": False,
}


def make_heads(num_kv_heads, num_queries=LENGTH):
    sizes = (num_queries, HEADS), (LENGTH, num_kv_heads), (LENGTH, num_kv_heads)
    return tuple(
        RNG.normal(size=(ROWS, length, heads, SIZE)).astype(np.float32)
        for length, heads in sizes
    )


@pytest.mark.parametrize(
    ("num_kv_heads", "given", "visible"),
    [
        (4, {"causal": True}, CAUSAL),
        (2, {"causal": True}, CAUSAL),
        (1, {"causal": False}, EVERY),
        (2, {"causal": True, "segment_ids": SEGMENTS}, CAUSAL & SAME),
        (
            2,
            {"causal": True, "window": Window(3), "segment_ids": SEGMENTS},
            CAUSAL & SAME & NEAR,
        ),
        (
            4,
            {"causal": True, "segment_ids": SEGMENTS, "mask": MASK | EYE},
            CAUSAL & SAME & (MASK | EYE),
        ),
    ],
)
def test_attention_equals_the_reference(num_kv_heads, given, visible):
    heads = make_heads(num_kv_heads)
    given = jax.tree.map(jnp.array, given)
    given["causal"] = bool(given["causal"])
    found = attend(*map(jnp.array, heads), **given)
    np.testing.assert_allclose(found, reference.attend(*heads, visible), atol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one", "documents"])
def test_bounds_of_a_layer_limit_keys_and_scores(cap, segments):
    """Fails if a window has one key more or less, or a cap comes after a mask."""
    q, k, v = make_heads(2)
    bounds = attention.Bounds(window=3, soft_cap=cap)
    found = attend(q, k, v, causal=True, segment_ids=segments, bounds=bounds)
    visible = CAUSAL & NEAR & (True if segments is None else SAME)
    scores = np.einsum("blkgd,bskd->bkgls", q.reshape(*q.shape[:2], 2, 2, SIZE), k)
    scores = scores.reshape(ROWS, HEADS, LENGTH, LENGTH) / math.sqrt(SIZE)
    scores = cap * np.tanh(scores / cap) if cap else scores
    weights = np.where(visible[:, None], np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhls,bshd->blhd", weights, v.repeat(2, 2))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_a_cap_of_scores_does_not_see_padding_after_the_lengths():
    q, k, v = make_heads(2)
    bounds, given = attention.Bounds(soft_cap=1.5), {"causal": True}
    found = attend(q, k, v, bounds=bounds, lengths=LENGTHS, **given)
    short = attend(*(x[:1, :4] for x in (q, k, v)), bounds=bounds, **given)
    np.testing.assert_allclose(found[:1, :4], short, rtol=1e-5)
    both_ways = attend(q, k, v, bounds=bounds, lengths=LENGTHS, causal=False)
    alone = attend(*(x[:1, :4] for x in (q, k, v)), bounds=bounds, causal=False)
    np.testing.assert_allclose(both_ways[:1, :4], alone, rtol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_sinks_take_part_of_the_softmax_and_have_no_value(cap):
    """Fails if a sink is that of another head, capped, masked or scaled."""
    q, k, v = make_heads(2)
    sinks = np.linspace(-2.0, 3.0, HEADS, dtype=np.float32)
    bounds = attention.Bounds(window=3, soft_cap=cap)
    found = attend(q, k, v, causal=True, bounds=bounds, sinks=jnp.array(sinks))
    scores = np.einsum("blhd,bshd->bhls", q, k.repeat(2, 2)) / math.sqrt(SIZE)
    scores = cap * np.tanh(scores / cap) if cap else scores
    weights = np.where((CAUSAL & NEAR)[:, None], np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    expected = np.einsum("bhls,bshd->blhd", weights, v.repeat(2, 2))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_cudnn_slides_windows_alone():
    assert attention.choose_implementation("auto", **H100, sliding=True)[0] == "cudnn"
    masked = H100 | {"masked": True}
    assert attention.choose_implementation("auto", **masked, sliding=True) == (
        "xla",
        "cudnn slides windows under no other mask",
    )


@pytest.mark.parametrize(
    ("given", "lack"),
    [
        ({"capped": True}, "has no soft cap of scores"),
        ({"dropped": True}, "has no dropout of attention weights"),
        ({"has_sinks": True}, "has no score without a key"),
    ],
)
def test_cudnn_is_refused_where_it_lacks_a_part(given, lack):
    found = attention.choose_implementation("auto", **H100, **given)
    assert found == ("xla", f"cudnn {lack}")
    with config_error(f"model.attention='cudnn' cannot run: it {lack}; use 'xla'"):
        attention.choose_implementation("cudnn", **H100, **given)


def test_dropout_zeroes_weights_after_the_softmax():
    """Fails if weights are renormalised, or a head, query or row draws as another."""
    q, k, _ = make_heads(2)
    # Value s is the unit vector of key s: the output is the weights themselves.
    unit = np.broadcast_to(np.eye(LENGTH, SIZE)[None, :, None], k.shape)
    unit = unit.astype(np.float32)
    heads = jnp.arange(HEADS)

    def weights(rate, key):
        given = Dropout(rate, jax.random.key(key), heads)
        return attend(q, k, unit, causal=False, dropout=given)

    plain = attend(q, k, unit, causal=False)
    seen = np.asarray(plain)[..., :LENGTH] > 0
    found = np.asarray(weights(0.25, 0))
    kept = found[..., :LENGTH] != 0
    np.testing.assert_allclose(
        found, np.where(found != 0, plain / 0.75, 0), rtol=1e-5, atol=1e-7
    )
    assert 0.1 < 1 - kept[seen].mean() < 0.4
    for axis in range(3):
        assert (np.diff(kept, axis=axis) != 0).any()
    assert not np.array_equal(kept, np.asarray(weights(0.25, 1))[..., :LENGTH] != 0)
    np.testing.assert_allclose(weights(0.0, 0), plain, rtol=1e-5, atol=1e-7)
    many = jax.vmap(lambda key: weights(0.25, key))(jnp.arange(400))
    np.testing.assert_allclose(many.mean(0), plain, atol=0.07)


def test_padding_after_the_lengths_is_not_seen():
    heads = make_heads(4)
    found = attend(*map(jnp.array, heads), causal=False, lengths=jnp.array(LENGTHS))
    visible = np.broadcast_to(np.arange(LENGTH) < LENGTHS[:, None, None], EVERY.shape)
    expected = reference.attend(*heads, visible)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            found[row, :length], expected[row, :length], atol=1e-5
        )


def test_cache_is_longer_than_the_queries():
    heads = make_heads(2, num_queries=1)
    mask = MASK[:, :1] | EYE[:, :1]
    found = attend(*map(jnp.array, heads), causal=False, mask=jnp.array(mask))
    np.testing.assert_allclose(found, reference.attend(*heads, mask), atol=1e-5)


def test_float16_runs_without_a_gpu():
    """Fails if a program asks for a product of float16 that only GPUs have."""
    heads = [jnp.array(x, jnp.float16) for x in make_heads(2)]
    found = attend(*heads, causal=True)
    assert found.dtype == jnp.float16
    wanted = reference.attend(*(np.float32(x) for x in heads), CAUSAL)
    np.testing.assert_allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "chosen", "reason"),
    [
        ({}, "cudnn", "bfloat16, head size 64"),
        ({"platform": "cpu"}, "xla", "cudnn needs an NVIDIA GPU and this is cpu"),
        ({"platform": "rocm"}, "xla", "cudnn needs an NVIDIA GPU and this is rocm"),
        (
            {"compute_capability": (7, 5)},
            "xla",
            "cudnn needs compute capability 8.0 and this GPU has 7.5",
        ),
        (
            {"dtype": "float32"},
            "xla",
            "cudnn needs bfloat16 or float16 and the activations are float32",
        ),
        (
            {"head_size": 36},
            "xla",
            "cudnn needs a head size that is a multiple of 8 up to 256 and this is 36",
        ),
        (
            {"head_size": 192, "compute_capability": (8, 0)},
            "xla",
            "cudnn needs a head size that is a multiple of 8 up to 128 and this is 192",
        ),
        (
            {"masked": True, "lengths": (8, 7)},
            "xla",
            "cudnn needs even lengths under a mask and this is 7",
        ),
        ({"masked": True}, "cudnn", "bfloat16, head size 64"),
        ({"lengths": (7, 7)}, "cudnn", "bfloat16, head size 64"),
    ],
    ids=str,
)
def test_auto_takes_cudnn_where_it_runs(change, chosen, reason):
    found = attention.choose_implementation("auto", **(H100 | change))
    assert found == (chosen, reason)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"platform": "cpu"}, ""),
        ({"compute_capability": (7, 0)}, ""),
        (
            {"dtype": "float32"},
            "set precision.compute_dtype to bfloat16 or float16, or ",
        ),
        ({"head_size": 512}, "change model.embed_size or model.num_heads, or "),
        ({"masked": True, "lengths": (7, 7)}, "use an even data.length, or "),
    ],
    ids=str,
)
def test_cudnn_asked_for_by_name_runs_or_fails(change, remedy):
    """For the reason that `auto` gives for not taking it."""
    _, reason = attention.choose_implementation("auto", **(H100 | change))
    lack = reason.removeprefix("cudnn ")
    with config_error(
        f"model.attention='cudnn' cannot run: it {lack}; {remedy}use 'auto' or 'xla'"
    ):
        attention.choose_implementation("cudnn", **(H100 | change))


def test_cudnn_is_refused_on_cpu_when_called():
    """Fails if attention falls back in silence."""
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    with pytest.raises(ConfigError, match=r"^model\.attention='cudnn' cannot run"):
        attention.dot_product_attention(x, x, x, causal=True, implementation="cudnn")


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_cudnn_is_given_the_rows_and_heads_of_one_device(monkeypatch, sizes):
    """Its rule of partition fails within the stages of a pipeline."""
    plain, seen = jax.nn.dot_product_attention, []

    def kernel(q, k, v, *, implementation, **settings):
        mesh = jax.sharding.get_abstract_mesh()
        seen.append((implementation, mesh.auto_axes, q.shape[0], q.shape[2]))
        return plain(q, k, v, implementation="xla", **settings)

    given = make_heads(2), {"segment_ids": SEGMENTS, "lengths": LENGTHS}
    expected = attend(*given[0], causal=True, **given[1])
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    choice = ("cudnn", "for this test")
    monkeypatch.setattr(attention, "choose_implementation", lambda *_, **__: choice)

    def on_stage(heads, masks):
        return attention.dot_product_attention(*heads, causal=True, **masks)

    given_sizes = {"data": 1, "pipeline": 2} | sizes
    devices = jax.devices()[: math.prod(given_sizes.values())]
    mesh = meshes.make_mesh(schema.Mesh(**given_sizes), devices)
    mapped = jax.shard_map(
        on_stage,
        in_specs=P(),
        out_specs=P(),
        axis_names={meshes.PIPELINE},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(*given)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    rows, heads = ROWS // sizes.get("data", 1), HEADS // sizes.get("tensor", 1)
    assert set(seen) == {("cudnn", (), rows, heads)}


def test_choice_is_logged_once(caplog):
    attention._log_choice.cache_clear()
    x = jnp.ones((1, 2, 1, 8))
    for _ in range(2):
        attention.dot_product_attention(x, x, x, causal=True)
    said = "attention: xla (cudnn needs an NVIDIA GPU and this is cpu)"
    assert caplog.messages == [said]


def test_a_window_of_a_known_or_traced_size_runs_on_the_kernels(monkeypatch):
    """Forward, dq, and dk with dv; one program whose loops end with the window."""
    for module in (attention, kernels):
        monkeypatch.setattr(module, "first_device", lambda: ("cuda", (9, 0)))
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(q, k, v, lengths, window):
        options = {"causal": True, "lengths": lengths, "window": window}
        out = attention.dot_product_attention(q, k, v, **options)
        return out.astype(jnp.float32).sum()

    window = Window(jax.ShapeDtypeStruct((), jnp.int32))
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    assert num_kernels(gradient, x, x, x, length, window) == 3


@pytest.mark.parametrize(
    ("change", "chosen", "reason"),
    [
        ({}, "mosaic_gpu", "window, bfloat16, head size 64"),
        ({"requested": "cudnn"}, "cudnn", "bfloat16, head size 64"),
        ({"compute_capability": (8, 0)}, "cudnn", "bfloat16, head size 64"),
        ({"head_size": 80}, "cudnn", "bfloat16, head size 80"),
        ({"windowed": False}, "cudnn", "bfloat16, head size 64"),
        ({"requested": "xla"}, "xla", "asked for"),
    ],
)
def test_what_runs_under_a_window(change, chosen, reason):
    given = {"requested": "auto", "windowed": True, "masked": True} | change
    assert attention.choose_implementation(**H100 | given) == (chosen, reason)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_scores_are_what_a_gradient_reads(rate, cap):
    """Against the residuals that JAX saves of explicit attention, without a compile.

    `score_bytes` leaves out two of these, which XLA makes where they are read: masks,
    of a byte, and the slope of a soft cap, which follows from its tanh. For dropout JAX
    saves a float32 that is constant, and XLA holds as many random bits.
    """
    heads, length = 2, 32

    def attend(q, key):
        dropout = Dropout(rate, key, jnp.arange(heads)) if rate else None
        return explicit_attention(q, q, q, cap=cap, dropout=dropout)

    def residuals(q, key):
        return jax.vjp(lambda q: attend(q, key), q)[1]

    q = jax.ShapeDtypeStruct((1, length, heads, 8), jnp.bfloat16)
    leaves = jax.tree.leaves(jax.eval_shape(residuals, q, jax.random.key(0)))
    pairs = heads * length**2
    wide = [x for x in leaves if x.size >= pairs and x.dtype != bool]
    found = sum(x.size * x.dtype.itemsize for x in wide) / pairs
    counted = score_bytes("bfloat16", capped=cap > 0, dropped=rate > 0)
    assert found - 4 * (cap > 0) == counted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_counted_attention_leaves_hidden_pairs_out(causal, window):
    """Fails if a program that is counted has another shape, or counts other pairs."""
    q, kv = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
    if window and not causal:
        pytest.skip("windows look back")
    bounds = attention.Bounds(window=window)

    def attend(q, k, v):
        return attention.dot_product_attention(q, k, v, causal=causal, bounds=bounds)

    with abstract.abstract_kernels():
        program = jax.make_jaxpr(attend)(q, kv, kv)
    assert program.out_avals[0].shape == attend(q, kv, kv).shape
    found, _ = count_flops(program, [False] * 3)
    # Of 8 queries, in a window of 3: 1, 2, 3, 3, ... of 36 pairs in all.
    share = (1 + 2 + 6 * 3) / 36 if window else 1.0
    every = share * 2 * (2 * 4 * 8 * 8) * (16 + 16)
    assert found == Flops(0.0, every / 2 if causal else every, every)
