"""On a GPU, log-probabilities of sampler and trainer are the same bits, too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generation.test_invariance import (
    APART,
    FAMILIES,
    PACKED,
    assert_same,
    make_model,
    write,
)
from tests.support import language
from tests.support.gpu import NEEDS_HOPPER
from zjax.generation.programs import CutDecoder
from zjax.models.stack import hidden_states
from zjax.ops import invariant_layers
from zjax_kernels import invariant

ONE_GPU = pytest.mark.skipif(jax.device_count() > 1, reason="needs one GPU alone")
pytestmark = NEEDS_HOPPER
K, ROWS, FEW = 384, (1, 8, 64, 300), (1, 300)
"""Inputs, and rows that are taken out of 4,096: each number is another kernel."""
LENGTHS = [200, 1, 77, 234], [512]
"""Texts of packed rows."""
PACKINGS = PACKED, APART
CONFIGS = {
    "gpt": language.GPT,
    "llama": language.LLAMA,
    "gates": FAMILIES["gates, caps, sinks and norms of heads"],
    "experts": FAMILIES["experts alone"],
    "latents": FAMILIES["latents"],
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sampler_and_trainer_agree_to_the_last_bit(config, dtype):
    """Fails if XLA for GPUs contracts, reorders or rounds by what stands beside."""
    model = make_model(config, dtype)
    decoder = CutDecoder(model)
    for chunk_size, packed in zip((5, 19), PACKINGS, strict=True):
        assert_same(write(decoder, chunk_size=chunk_size), model, packed)


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def assert_rows_are_alone(run, x, numbers=FEW):
    """Fails if a row of `run(x)` is other bits where other rows stand beside."""
    found = np.asarray(run(x))
    for rows in numbers:
        first = (len(x) - rows) // 3
        alone = np.asarray(run(x[first : first + rows]))
        np.testing.assert_array_equal(alone, found[first : first + rows])
    return found


@ONE_GPU
@pytest.mark.parametrize(("columns", "numbers"), [(1024, ROWS), (320, FEW)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(columns, numbers):
    """In tiles of 64 to 256 columns; fails if the width of an instruction counts."""
    x, matrix = draw(0, 4096, K), draw(1, K, columns)
    run = jax.jit(functools.partial(invariant.matmul, dtype=jnp.bfloat16))
    found = assert_rows_are_alone(lambda x: run(x, matrix), x, numbers)
    expected = np.float64(x) @ np.float64(matrix)
    np.testing.assert_allclose(np.float64(found), expected, rtol=4e-3, atol=1e-3)


@ONE_GPU
def test_a_row_of_logits_does_not_depend_on_the_number_of_rows():
    """With the head as stored, of a vocabulary that no tile divides, in float32."""
    x, head = draw(0, 4096, K), draw(1, 1001, K)
    run = jax.jit(invariant_layers.logits)
    found = assert_rows_are_alone(lambda x: run(x, head), x)
    expected = np.float64(x) @ np.float64(head).T
    np.testing.assert_allclose(np.float64(found), expected, atol=1e-3)


@ONE_GPU
def test_a_row_of_partitions_does_not_depend_on_the_number_of_rows():
    scores = 8 * draw(0, 4096, 4096 + 384).astype(jnp.float32)
    found = assert_rows_are_alone(jax.jit(invariant.log_partition), scores)
    expected = np.log(np.exp(np.float64(scores)).sum(-1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@ONE_GPU
@pytest.mark.parametrize("centre", [False, True])
def test_a_row_of_a_norm_does_not_depend_on_the_number_of_rows(centre):
    x, scale = draw(0, 4096, 1536), draw(1, 1536)
    how = {"bias": scale if centre else None, "eps": 1e-6, "centre": centre}
    run = jax.jit(functools.partial(invariant_layers.normalize, **how))
    assert_rows_are_alone(lambda x: run(x, scale), x)


HEADS = {
    "groups of 6": (128, 12, {}),
    "one head": (64, 2, {"window": 100}),
    "a cap": (256, 8, {"soft_cap": 5.0}),
}


@ONE_GPU
@pytest.mark.parametrize(("size", "heads", "how"), HEADS.values(), ids=HEADS)
def test_chunks_and_packed_rows_attend_with_the_same_bits(size, heads, how):
    """Fails if a tile of few queries adds up keys as one of many queries does not."""
    length = sum(LENGTHS[0])
    shapes = (2, length, heads, size), (2, length, 2, size)
    q, k, v = draw(0, *shapes[0]), draw(1, *shapes[1]), draw(2, *shapes[1])
    texts = [np.concatenate([*map(np.arange, each)]) for each in LENGTHS]
    how = {"scale": size**-0.5, **how}
    packed = jax.jit(functools.partial(invariant.packed_attention, **how))
    found = np.asarray(packed(q, k, v, jnp.int32(np.stack(texts))))
    assert np.isfinite(found.astype(np.float32)).all()
    usual = plain_attention(q, k, v, np.stack(texts), **how)
    np.testing.assert_allclose(np.float32(found), usual, rtol=2e-2, atol=2e-2)
    paged = jax.jit(functools.partial(invariant.paged_attention, **how))
    for row, start, number in (0, 0, 200), (0, 278, 234), (1, 0, 512):
        text = slice(start, start + number)
        pool, table = to_pages(k[row, text], v[row, text])
        for tokens in (1, 7, 64):
            # As many chunks for each text, of which the last have no tokens.
            chunks = -(-length // tokens)
            starts = np.arange(chunks, dtype=np.int32) * tokens
            counts = np.clip(number - starts, 0, tokens).astype(np.int32)
            padding = [(0, chunks * tokens - number), (0, 0), (0, 0)]
            given = jnp.pad(q[row, text], padding).reshape(chunks, tokens, heads, size)
            pages = np.repeat(table[None], chunks, axis=0)
            own = np.asarray(paged(given, *pool, pages, starts, counts))
            own = own.reshape(-1, heads, size)[:number]
            np.testing.assert_array_equal(own, found[row, text])


def to_pages(k, v, page_size=64, num_pages=10):
    """Keys and values of a text in pages of a pool, in any order."""
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32)[:8]
    padding = [(0, len(table) * page_size - len(k)), (0, 0), (0, 0)]

    def fill(x):
        x = jnp.pad(x, padding, constant_values=jnp.nan)
        x = jnp.swapaxes(x.reshape(len(table), page_size, *x.shape[1:]), 1, 2)
        return jnp.zeros((num_pages, *x.shape[1:]), x.dtype).at[table].set(x)

    return (fill(k), fill(v)), table


def plain_attention(q, k, v, positions, scale, window=0, soft_cap=0.0):
    """Attention within texts in float32."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    with jax.default_matmul_precision("float32"):
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * scale
        scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
        text = np.arange(positions.shape[1]) - positions
        back = positions[:, :, None] - positions[:, None]
        seen = (text[:, :, None] == text[:, None]) & (back >= 0)
        seen &= back < (window or positions.size)
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        return np.asarray(jnp.einsum("bhlm,bmhd->blhd", weights, v))


WIDE = dataclasses.replace(
    language.LLAMA,
    embed_size=512,
    mlp_size=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
)
"""A small decoder whose products, norms and heads of 128 channels have kernels."""


@ONE_GPU
def test_kernels_of_sampler_and_trainer_agree_to_the_last_bit():
    """Fails if a kernel, or what XLA makes between them, depends on the batch."""
    model = make_model(WIDE, jnp.bfloat16)
    decoder = CutDecoder(model)
    written = write(decoder, chunk_size=5, page_size=64)
    for packed in PACKINGS:
        assert_same(written, model, packed)


@ONE_GPU
def test_the_trainer_runs_the_kernels():
    """Fails if plain JAX, which is many times slower, takes the place of a kernel."""
    model = make_model(WIDE, jnp.bfloat16)
    tokens, ids = jnp.zeros((2, 80), jnp.int32), jnp.ones((2, 80), jnp.int32)

    def run(tokens, ids):
        hidden = hidden_states(model, {"tokens": tokens, "segment_ids": ids}, None)
        found = model.head.target_logprobs(hidden, None, tokens, 1.0)
        return found.logprobs

    text = jax.jit(run).lower(tokens, ids).compile().as_text()
    # Two layers of two norms, attention, seven products; a norm, the head, a partition.
    assert text.count('custom_call_target="mosaic_gpu') >= 23
