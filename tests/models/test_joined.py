"""Blocks for few rows read their weights in four products."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support import language
from tests.support.lowering import num_kernels
from zjax.generation.chunks import Chunks
from zjax.generation.passes import Reader
from zjax.models import lora
from zjax.models.continuation import params_of
from zjax.models.projections import finish
from zjax.moe import few_rows
from zjax.ops import matmul
from zjax.settings import schema
from zjax_kernels import device


def products_of(config, monkeypatch):
    """What the products of few rows of a block are given, in order."""
    reader = Reader.of(language.make_language_model(config))
    model, found = language.make_language_model(config), []
    real = matmul.few_rows_matmul

    def watched(x, weights, **fused):
        assert fused.pop("early")  # weights are read before other kernels end
        names = {name for name, value in fused.items() if value not in (None, "")}
        found.append((weights.shape, names))
        return real(x, weights, **fused)

    monkeypatch.setattr(matmul, "few_rows_matmul", watched)
    weights = jax.eval_shape(reader.cut, params_of(model))
    jax.eval_shape(lambda w: reader.empty_caches(w, 2, 4), weights)
    return found


def test_a_block_of_a_llama_is_four_products(monkeypatch):
    """Fails if matrices stand apart, or norms, gates and residuals are left over."""
    width, mlp = language.LLAMA.embed_size, language.LLAMA.mlp_size
    kv = language.LLAMA.num_kv_heads * 4
    found = products_of(language.LLAMA, monkeypatch)
    assert found[:4] == [
        ((width, width + 2 * kv), {"norm"}),
        ((width, width), {"residual"}),
        ((width, 2 * mlp), {"norm", "activation"}),
        ((mlp, width), {"residual"}),
    ]


def test_biases_stay_between_a_product_and_what_follows(monkeypatch):
    found = products_of(language.GPT, monkeypatch)
    width = language.GPT.embed_size
    assert found[0] == ((width, 3 * width), set())
    assert all("residual" not in names for _, names in found)


def test_adapters_keep_matrices_apart():
    """Fails if an adapter is left out of what a text reads."""
    model = language.make_language_model(language.LLAMA)
    lora.attach(model, jax.random.key(0), settings=schema.Lora(rank=2))
    reader = Reader.of(model)
    layer = reader.cut(params_of(model)).blocks[0]
    assert {"kernel", "lora"} <= set(layer["attention"]["query"])


MIXTURE = dataclasses.replace(
    language.LLAMA,
    embed_size=64,
    head_size=64,
    moe=schema.TokenChoice(num_experts=8, top_k=2, expert_size=64),
)


def decoding(config, num_rows):
    """A pass that reads a token of each row, and shapes of the arrays."""
    reader = Reader.of(language.make_language_model(config))
    params = params_of(language.make_language_model(config))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    weights = jax.eval_shape(reader.cut, params)
    numbers = jax.ShapeDtypeStruct((num_rows,), jnp.int32)

    def attend(parts, cache, how, q, k, v, new):
        return finish(q, k, v, new)[0], cache

    def run(weights, numbers):
        grid = numbers[:, None]
        part = Chunks(grid, numbers, numbers, grid, numbers, numbers)
        empty = tuple((None,) for _ in weights.blocks)
        return reader.read(weights, empty, (part,), attend)[0]

    return run, weights, numbers


def test_a_pass_takes_matrices_of_latents_as_they_were_prepared():
    """Fails if a pass computes the matrices, or if weights hold one twice."""
    latent = dataclasses.replace(language.LATENT.latent, key_rank=64)
    config = dataclasses.replace(language.LATENT, latent=latent)
    params = params_of(language.make_language_model(config))
    run, weights, numbers = decoding(config, 1)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, weights)]
    assert sizes[0] == sizes[1]
    attention = weights.blocks[0]["attention"]
    assert "key_value" not in attention
    assert attention["to_keys"].shape == (4, latent.plain_size, 64)
    assert attention["to_values"].shape == (4, 64, latent.value_size)
    # A product with 64 unit vectors takes 64 times as long as with a token.
    costs: Any = jax.jit(run).lower(weights, numbers).cost_analysis()
    assert costs["flops"] < 4 * sizes[0]


def test_few_tokens_are_not_sorted_by_expert(monkeypatch):
    """Fails if decoding runs the path of training, or a prompt the path of decoding."""
    found, real = [], few_rows.few_rows_experts

    def watched(x, *arrays, **settings):
        found.append((x.shape, {key for key, x in settings.items() if x is not None}))
        return real(x, *arrays, **settings)

    monkeypatch.setattr(few_rows, "few_rows_experts", watched)
    program = str(jax.make_jaxpr(decoding(MIXTURE, 4)[0])(*decoding(MIXTURE, 4)[1:]))
    assert "sort[" not in program and "ragged" not in program
    assert found[0] == ((4, 64), {"norm", "residual", "activation", "early"})
    found.clear()
    run, *arrays = decoding(MIXTURE, 65)
    assert "sort[" in str(jax.make_jaxpr(run)(*arrays)) and not found


def test_shared_experts_keep_norm_and_residual(monkeypatch):
    """Fails if the shared feed-forward is left out, or reads tokens without norm."""
    found, real = [], few_rows.few_rows_experts

    def watched(x, *arrays, **settings):
        found.append({key for key, x in settings.items() if x is not None})
        return real(x, *arrays, **settings)

    monkeypatch.setattr(few_rows, "few_rows_experts", watched)
    moe = dataclasses.replace(MIXTURE.moe, num_shared=1)
    run, *arrays = decoding(dataclasses.replace(MIXTURE, moe=moe), 4)
    jax.eval_shape(run, *arrays)
    assert found[0] == {"activation", "early"}


@pytest.mark.parametrize(
    "moe",
    [MIXTURE.moe, dataclasses.replace(MIXTURE.moe, num_groups=4, top_groups=2)],
    ids=["a kernel", "the router of training"],
)
def test_padding_of_a_pass_chooses_no_expert(monkeypatch, moe):
    """Fails if lanes that fill up a pass read experts."""
    counts, real = [], few_rows.few_rows_experts

    def watched(x, choice, *arrays, **settings):
        jax.debug.callback(lambda count: counts.append(int(count)), choice.count[0])
        return real(x, choice, *arrays, **settings)

    monkeypatch.setattr(few_rows, "few_rows_experts", watched)
    config = dataclasses.replace(MIXTURE, moe=moe)
    run, *arrays = decoding(config, 5)
    weights, _ = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)
    jax.block_until_ready(jax.jit(run)(weights, jnp.array([0, 1, 0, 1, 0])))
    jax.effects_barrier()
    assert counts == [2, 2]
    counts.clear()
    jax.block_until_ready(jax.jit(run)(weights, jnp.zeros(5, jnp.int32)))
    jax.effects_barrier()
    assert counts == [0, 0]


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_mixture_is_three_kernels(monkeypatch, num_rows):
    """Router, and the products before and behind the activation; attention is two."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    assert num_kernels(*decoding(MIXTURE, num_rows)) == 2 + 3
