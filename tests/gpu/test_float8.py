"""Float8 products on the GPU: the kernels that run, and what they compute."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import float8 as reference
from tests.support.gpu import NEEDS_GPU
from zjax.models.build import make_model
from zjax.ops import matmul
from zjax.settings import schema

pytestmark = NEEDS_GPU
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Left to itself, the compiler times its own kernels against cuBLAS for each shape."""
SHAPE = schema.Model(
    num_layers=2,
    embed_size=512,
    mlp_size=2_048,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=1_024,
    max_length=256,
)


def count_gemms(text):
    """Calls of cuBLAS with float8 operands, and all others."""
    names = re.findall(r'custom_call_target="__cublas([^"]*)"', text)
    return names.count("$lt$matmul$f8"), len(names) - names.count("$lt$matmul$f8")


@pytest.mark.parametrize("num_batch_shards", [1, 2])
def test_product_and_gradients_run_in_float8_and_equal_numpy(num_batch_shards):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 256, 512), (512, 8, 128), (4, 256, 8, 128)
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]

    def product_and_gradients(x, kernel, dy):
        product = functools.partial(matmul.dot, num_batch_shards=num_batch_shards)
        y, pull = jax.vjp(product, x, kernel)
        return y, *pull(dy)

    compiled = jax.jit(product_and_gradients).lower(*arrays).compile(OPTIONS)
    assert count_gemms(compiled.as_text()) == (3, 0)
    expected = reference.product_and_gradients(*arrays, 1, num_batch_shards)
    for got, exact in zip(compiled(*arrays), expected, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - exact)
        assert error <= 5e-3 * np.linalg.norm(exact)


def loss_and_gradients(matmul_dtype, layers_per_scan):
    """Of initial weights, and the text of the compiled program."""
    config = schema.Config(
        model=dataclasses.replace(SHAPE, layers_per_scan=layers_per_scan),
        precision=schema.Precision(matmul_dtype=matmul_dtype),
    )
    model = make_model(config)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = jax.random.randint(jax.random.key(1), (8, 257), 0, SHAPE.vocab_size)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(params):
        return model.loss(params, {}, batch, jax.random.key(2)).value

    compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile(OPTIONS)
    value, grads = compiled(params)
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(grads)]
    return float(value), np.concatenate(leaves), compiled.as_text()


@pytest.mark.parametrize("layers_per_scan", [0, 1])
def test_all_but_the_head_runs_in_float8(layers_per_scan):
    """Merged or not, no projection is left to another kernel."""
    loss, grads, text = loss_and_gradients("float8", layers_per_scan)
    wide_loss, wide_grads, wide_text = loss_and_gradients("compute", layers_per_scan)
    num_float8, num_wide = count_gemms(text)
    assert count_gemms(wide_text)[0] == 0
    assert num_wide == 3
    assert num_float8 >= 3 * 4 * (1 if layers_per_scan else SHAPE.num_layers)
    np.testing.assert_allclose(loss, wide_loss, rtol=2e-3)
    sizes = np.linalg.norm(grads) * np.linalg.norm(wide_grads)
    assert grads @ wide_grads > 0.99 * sizes
