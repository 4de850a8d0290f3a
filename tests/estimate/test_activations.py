"""Activations by formula against sums by hand."""

import jax
import jax.numpy as jnp
import pytest

from tests.support import pipelines
from zjax.estimate.activations import (
    activation_bytes,
    saved_values,
    scores_per_token,
)
from zjax.ops.explicit_attention import Dropout, explicit_attention
from zjax.settings import schema
from zjax.settings.axes import axis_sizes
from zjax.settings.batch import BatchSizes

LAYERS, WIDTH, LENGTH = 8, 64, 256
BLOCK, KEPT, INPUT = 16, 10, 1
"""Of a block: everything, what `elementwise` keeps, what enters it."""
WORKING = 2 * BLOCK


def without_vocabulary(model):
    """Leaves no logits, as no setting does."""
    object.__setattr__(model, "vocab_size", 0)


def units(num_microbatches=8, ways=None, remat="elementwise", **settings):
    """Per token of a microbatch on one device, without logits."""
    memory, moe = settings.pop("memory", "device"), settings.pop("moe", {})
    chunk_tokens = settings.pop("chunk_tokens", 0)
    attention = settings.pop("attention", {})
    config = schema.Config(
        mesh=schema.Mesh(**settings),
        pipeline=pipelines.made_by(ways),
        model=schema.Model(
            num_layers=LAYERS,
            embed_size=WIDTH,
            mlp_size=4 * WIDTH,
            num_heads=4,
            num_kv_heads=4,
            remat=remat,
            activation_memory=memory,
            mlp_chunk_tokens=chunk_tokens,
            moe=schema.TokenChoice(**moe) if moe else None,
            **attention,
        ),
        data=schema.Data(length=LENGTH),
    )
    without_vocabulary(config.model)
    batch = BatchSizes(2 * num_microbatches, num_microbatches, 2)
    found = activation_bytes(config, axis_sizes(config, 8), batch)
    return found / (2 * LENGTH * WIDTH * 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LAYERS * KEPT + WORKING),
        ({"remat": "full"}, LAYERS * INPUT + WORKING),
        ({"remat": "full", "memory": "pinned_host"}, WORKING),
        (
            {"remat": "full", "chunk_tokens": LENGTH // 2},  # of two sequences
            LAYERS * INPUT + 2 * (BLOCK - 8 * 3 / 4),
        ),
        (
            {"remat": "full", "chunk_tokens": LENGTH // 4, "tensor": 4},
            (LAYERS * INPUT + 2 * (BLOCK - 8 * 1 / 2)) / 4,
        ),
        (  # two chunks, the smaller filled up
            {"remat": "full", "chunk_tokens": LENGTH + 2},
            LAYERS * INPUT + 2 * (BLOCK - 8 * 1 / 2),
        ),
        ({"tensor": 4}, (LAYERS * KEPT + WORKING) / 4),
        ({"sequence": 2, "tensor": 2}, (LAYERS * KEPT + WORKING) / 4),
    ],
)
def test_what_a_device_keeps(settings, expected):
    assert units(**settings) == expected


SCORES = 4 * LENGTH / WIDTH * 10 / 2
"""float32 scores and weights and bfloat16 weights of 4 heads, in bfloat16 values."""


@pytest.mark.parametrize(
    ("attention", "scores"),
    [
        ({"attention_sinks": True}, SCORES),
        ({"attention": schema.Xla()}, SCORES),
        ({"attention_dropout_rate": 0.1}, 1.4 * SCORES),
        ({"attention_soft_cap": 30.0}, 1.4 * SCORES),
    ],
)
def test_scores_of_explicit_attention(attention, scores):
    """One block holds them twice; `none` keeps them for each layer."""
    expected = LAYERS * KEPT + WORKING + 2 * scores
    assert units(attention=attention) == pytest.approx(expected)
    shared = units(attention=attention, sequence=2, tensor=2)
    assert shared == pytest.approx(expected / 4)
    kept = units(attention=attention, remat="none")
    assert kept == pytest.approx(LAYERS * (BLOCK + scores) + 2 * (BLOCK + scores))


def test_a_ring_holds_no_scores():
    ring = {"attention": schema.Xla(), "sequence_attention": "ring"}
    assert units(sequence=8, attention=ring) == (LAYERS * KEPT + WORKING) / 8


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_scores_are_what_a_gradient_reads(rate, cap):
    """Against the residuals that JAX saves of explicit attention, without a compile.

    The formula leaves out two of these, which XLA makes where they are read: masks, of
    a byte, and the slope of a soft cap, which follows from its tanh. For dropout JAX
    saves a float32 that is constant, and XLA holds as many random bits.
    """
    heads = 2

    def attend(q, key):
        dropout = Dropout(rate, key, jnp.arange(heads)) if rate else None
        return explicit_attention(q, q, q, cap=cap, dropout=dropout)

    def residuals(q, key):
        return jax.vjp(lambda q: attend(q, key), q)[1]

    q = jax.ShapeDtypeStruct((1, LENGTH, heads, 8), jnp.bfloat16)
    leaves = jax.tree.leaves(jax.eval_shape(residuals, q, jax.random.key(0)))
    pairs = heads * LENGTH**2
    wide = [x for x in leaves if x.size >= pairs and x.dtype != bool]
    found = sum(x.size * x.dtype.itemsize for x in wide) / pairs
    model = schema.Model(
        num_heads=heads,
        attention=schema.Xla(),
        attention_dropout_rate=rate,
        attention_soft_cap=cap,
    )
    config = schema.Config(model=model, data=schema.Data(length=LENGTH))
    counted = scores_per_token(config, axis_sizes(config, 1)) * 2 / (heads * LENGTH)
    assert found - 4 * (cap > 0) == counted


def test_latents_are_kept_with_what_attention_reads():
    """Queries, keys and filled-up values of 4 heads of 12; 5 + 4 and 7 of latents."""
    latent = schema.Latent(key_rank=5, query_rank=7, plain_size=8, value_size=6)
    sizes = {"num_heads": 4, "embed_size": 16, "mlp_size": 32}
    model = schema.Model(positions=schema.Rotary(size=4), latent=latent, **sizes)
    kept = 16 + 48 + 16 + 3 * 48 + 5 + 4 + 7 + 32
    assert saved_values(model, "elementwise") == kept
    assert saved_values(model, "attention") == 16 + 48


def test_experts_of_a_token():
    """Each choice keeps the channels of a feed-forward, and moves two rows."""
    wider = 4
    every = units(moe={"num_experts": 8, "top_k": 2})
    block = BLOCK + 2 * wider + 2 * 2
    assert every == LAYERS * (KEPT + wider) + 2 * block
    half = units(moe={"num_experts": 8, "top_k": 2, "every": 2})
    block = BLOCK + wider + 2 * 2
    assert half == LAYERS * (KEPT + wider / 2) + 2 * block


@pytest.mark.parametrize(
    ("schedule", "waiting", "layers"),
    [("1f1b", 3, 4), ("gpipe", 8, 4), ("interleaved", 5, 2)],
)
def test_stages_keep_what_waits(schedule, waiting, layers):
    """Two stages of one chunk of four layers, or two of two; what waits is what entered
    a chunk, or all that it keeps."""
    ways = {"kind": schedule}
    again = units(pipeline=2, ways=ways)
    assert again == waiting * INPUT + layers * KEPT + WORKING
    kept = units(pipeline=2, ways=ways | {"recompute": False})
    assert kept == waiting * layers * KEPT + WORKING


def test_logits_of_one_chunk_of_tokens():
    """float32 and their gradients, with the float32 gradient of the matrix."""
    model = schema.Model(num_layers=1, vocab_size=1000, loss_chunk_tokens=64)
    config = schema.Config(model=model, mesh=schema.Mesh(tensor=2))
    sizes, batch = axis_sizes(config, 2), BatchSizes(1, 1, 1)
    one = activation_bytes(config, sizes, batch)
    without_vocabulary(config.model)
    two = activation_bytes(config, sizes, batch)
    assert one - two == 500 * (64 * (4 + 2) + 4 * model.embed_size)
