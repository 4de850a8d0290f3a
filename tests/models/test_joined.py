"""Blocks for few rows read their weights in four products."""

import jax

from tests.support import language
from zjax.generation.passes import Reader
from zjax.models import lora
from zjax.models.continuation import params_of
from zjax.ops import matmul
from zjax.settings import schema


def products_of(config, monkeypatch):
    """What the products of few rows of a block are given, in order."""
    reader = Reader.of(language.make_language_model(config))
    model, found = language.make_language_model(config), []
    real = matmul.few_rows_matmul

    def watched(x, weights, **fused):
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
