"""Decoded tokens: six kernels for each layer, and the numbers of a longer chunk."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from tests.support.lowering import cuda_program
from zjax.generation.chunks import Chunks
from zjax.generation.passes import Reader
from zjax.generation.shards import by_shard, shard_axes
from zjax.models.continuation import params_of
from zjax.settings import schema
from zjax.sharding.mesh import make_mesh
from zjax_kernels import device, paged_attention
from zjax_kernels.decode.latent import mosaic_gpu
from zjax_kernels.warpgroups import HAS_EARLY_START

PAGE_SIZE, TABLE = 16, 3
LLAMA = dataclasses.replace(
    language.LLAMA,
    num_layers=1,
    embed_size=256,
    mlp_size=256,
    num_heads=4,
    num_kv_heads=2,
)
FAMILIES = {
    "a llama": LLAMA,
    "heads of 128 channels without groups": dataclasses.replace(
        LLAMA, head_size=128, num_kv_heads=4
    ),
    "groups of 8, norms of heads": dataclasses.replace(
        LLAMA, head_size=64, num_heads=8, num_kv_heads=1, query_key_norm=True
    ),
    "biases": dataclasses.replace(LLAMA, attention_bias="inputs"),
    "a window, a cap and sinks": dataclasses.replace(
        LLAMA,
        window=schema.SlidingWindow(size=9),
        attention_soft_cap=2.0,
        attention_sinks=True,
    ),
    "some layers without rotation": dataclasses.replace(
        LLAMA, num_layers=2, positions=schema.Rotary(unrotated_every=2)
    ),
}


def make_reader(config, dtype=jnp.float32):
    """The reader of a model, weights, and empty pages."""
    model = language.make_language_model(config)
    reader, params = Reader.of(model), params_of(model)

    def scale(x):
        """Makes matrices of 256 rows as small as those of a real model."""
        return (x * 0.2 if x.ndim > 2 else x).astype(dtype)

    weights = reader.cut(jax.tree.map(scale, params))
    return reader, weights, reader.empty_caches(weights, 1 + 4 * TABLE, PAGE_SIZE)


def chunks_at(starts, counts, tokens):
    """Chunks of tokens [C, T] of rows that have pages of their own."""
    pages = 1 + np.arange(len(starts) * TABLE).reshape(-1, TABLE)[:, ::-1]
    length = np.full(len(starts), PAGE_SIZE * TABLE)
    arrays = tokens, starts, counts, pages, length, length
    return Chunks(*(jnp.asarray(x, jnp.int32) for x in arrays))


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_layer_is_four_products_a_rotation_and_attention(
    monkeypatch, config, num_rows
):
    """Fails if queries are padded, keys scattered, or outputs merged between them.

    Besides kernels, a layer reshapes arrays in place.
    """
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    reader, *arrays = make_reader(config, jnp.bfloat16)
    nothing = np.zeros(num_rows)
    parts = (chunks_at(nothing, nothing, nothing[:, None]),)
    leaves, structure = jax.tree.flatten((*arrays, parts))
    text = cuda_program(lambda *x: reader.read(*structure.unflatten(x)), *leaves)
    [block] = re.findall(r"private @_run_block\w*\((.*?)\n  }", text, re.DOTALL)
    found = re.findall(r"= stablehlo\.(\w+)", block)
    [num_layers] = reader.continuation.num_layers
    assert found.count("custom_call") == block.count("@mosaic_gpu") == 6 * num_layers
    assert set(found) == {"custom_call", "reshape"}
    assert ("griddepcontrol.wait" in text) == HAS_EARLY_START


def test_each_data_shard_runs_the_kernels(monkeypatch):
    """Fails if the compiler is left to split a pass, which it cannot do to a kernel."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    with jax.set_mesh(make_mesh(schema.Mesh(), jax.devices()[:4])):
        reader, *arrays = make_reader(LLAMA, jnp.bfloat16)
        parts = (chunks_at(*np.zeros((2, 8)), np.zeros((8, 1))),)
        leaves, structure = jax.tree.flatten((*arrays, parts))

        def read_part(*given):
            return reader.read(*given)[:2]

        def read(*leaves):
            mapped = by_shard(read_part, shard_axes(), (None, 0, 0), (0, 0))
            return mapped(*structure.unflatten(leaves))

        text = cuda_program(read, *leaves)
    [block] = re.findall(r"private @_run_block\w*\((.*?)\n  }", text, re.DOTALL)
    [num_layers] = reader.continuation.num_layers
    assert block.count("@mosaic_gpu") == 6 * num_layers
    local = f"tensor<{1 + 4 * TABLE}x2x{PAGE_SIZE}x64xbf16>"
    assert local in block and f"<{4 * (1 + 4 * TABLE)}x2" not in block


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_latents_have_a_kernel(monkeypatch, num_tokens):
    """Fails if rotated channels are read as values, or latents are copied."""
    forced = functools.partial(paged_attention, implementation="mosaic_gpu")
    monkeypatch.setattr("zjax.generation.pages.paged_attention", forced)
    config = dataclasses.replace(
        language.LATENT,
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        positions=schema.Rotary(size=64),
        latent=schema.Latent(key_rank=128, query_rank=0, plain_size=64),
    )
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    found = []

    def watched(q, cache, sinks, options):
        found.append((q.shape, cache.keys.shape, options.value_size, options.early))
        assert cache.values is cache.keys
        return q[..., : options.value_size]

    monkeypatch.setattr(mosaic_gpu, "paged_attention", watched)
    reader, *arrays = make_reader(config, jnp.bfloat16)
    tokens = np.zeros((2, num_tokens))
    parts = (chunks_at([0, 0], [num_tokens] * 2, tokens),)
    jax.eval_shape(reader.read, *arrays, parts)
    pool = 1 + 4 * TABLE, 1, PAGE_SIZE, 192
    assert found == [((2, num_tokens, 8, 192), pool, 128, True)]


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_tokens_one_by_one_are_the_tokens_of_a_chunk(config):
    """Also over the border of a page, and beside rows that have no token."""
    reader, weights, caches = make_reader(config)
    tokens = np.random.default_rng(0).integers(0, 29, size=(3, 24))
    counts = np.array([24, 18, 3])
    first = np.minimum(counts, [13, 16, 0])
    whole = chunks_at([0, 0, 0], counts, tokens)
    read = jax.jit(lambda caches, *parts: reader.read(weights, caches, parts)[:2])
    expected, expected_caches = read(caches, whole)
    expected = np.reshape(expected, (*tokens.shape, -1))
    _, caches = read(caches, chunks_at([0, 0, 0], first, tokens))
    for step in range(12):
        places = first + step
        is_read = places < counts
        some = tokens[np.arange(3), np.minimum(places, 23)]
        chunks = chunks_at(places, is_read, some[:, None])
        found, caches = read(caches, chunks)
        for row in np.flatnonzero(is_read):
            wanted = expected[row, places[row]]
            np.testing.assert_allclose(found[row, 0], wanted, atol=2e-4)
    for pages, wanted in zip(
        *map(jax.tree.leaves, (caches, expected_caches)), strict=True
    ):
        np.testing.assert_allclose(pages[1:], wanted[1:], atol=2e-4)
