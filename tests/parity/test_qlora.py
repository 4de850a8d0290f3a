"""Adapters beside codes take the steps of plain code on dequantised matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity import test_lora as lora
from zjax.sharding.placement import array_bytes

pytest.importorskip("qwix", reason="needs qwix")

BLOCK = 8
BITS = {"int8": 8, "int4": 4}


def make_config(dtype, **settings):
    adapters = {"rank": lora.RANK, "alpha": lora.ALPHA}
    codes = {"kind": dtype, "block_size": BLOCK}
    adapters |= {"quantize": codes} if dtype else {}
    return lora.make_config(lora=adapters, **settings)


def rounded(kernel, num_inputs, dtype):
    """A stack of matrices as codes of NumPy and back, and its scales."""
    kernel, last = np.asarray(kernel), 2 ** (BITS[dtype] - 1) - 1
    dim = num_inputs
    size = min(BLOCK, kernel.shape[dim])
    blocks = kernel.reshape(*kernel.shape[:dim], -1, size, *kernel.shape[dim + 1 :])
    scales = np.abs(blocks).max(dim + 1, keepdims=True) / np.float32(last)
    return (np.rint(blocks / scales) * scales).reshape(kernel.shape), scales


def dequantised(tree, dtype):
    if not isinstance(tree, dict):
        return tree
    found = {name: dequantised(x, dtype) for name, x in tree.items()}
    if "lora" in tree:
        num_inputs = tree["lora"]["a"].ndim - 2
        found["kernel"] = jnp.asarray(rounded(tree["kernel"], num_inputs, dtype)[0])
    return found


@functools.cache
def expected(dtype):
    """Losses of plain LoRA on dequantised matrices, and on the matrices themselves."""
    batch = jax.tree.map(jnp.asarray, lora.make_batch())
    params = lora.first_params(make_config(""))
    plain = lora.make_model(lora.make_config(lora={}))

    def loss(merged):
        return plain.loss(merged, {}, batch, None).value

    return [
        lora.oracle(tree, "lora", loss)[0]
        for tree in (dequantised(params, dtype), params)
    ]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("int8", {"zero": {"stage": 0}}),
        (
            "int4",
            {
                "zero": {"stage": 3, "min_shard_elements": 0},
                "num_microbatches": 2,
                "model": lora.SHAPE | {"layers_per_scan": 1, "remat": "full"},
            },
        ),
    ],
    ids=["int8, stage 0", "int4, stage 3, scan, remat"],
)
def test_steps_are_those_of_dequantised_matrices(dtype, settings):
    """Fails if codes have other scales, a wrong gradient passes, or none are used."""
    run = lora.run_of(make_config(dtype, **settings))
    losses = lora.losses_of(run, lora.make_batch())
    here, unquantised = expected(dtype)
    np.testing.assert_allclose(losses, here, rtol=2e-6)
    assert losses[0] - losses[-1] > 0.01
    assert np.abs(np.subtract(losses, unquantised)).max() > 2e-5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bytes_per_weight(dtype):
    """Fails if codes are widened on the devices, or stored beside their matrices."""
    run = lora.run_of(make_config(dtype, zero={"stage": 0}))
    blocks = run.state.master["blocks"]
    leaves = jax.tree_util.tree_leaves_with_path(blocks)
    kernels = [x for keys, x in leaves if keys[-1].key == "kernel"]
    assert len(kernels) == 7
    for x in kernels:
        assert x.dtype == dtype
    program = jax.jit(lambda codes: [-x for x in codes]).lower(kernels).compile()
    stored = sum(x.size for x in kernels) * BITS[dtype] // 8
    assert program.memory_analysis().argument_size_in_bytes == stored
    rows = jax.tree.leaves(run.plan.master)
    assert [row.device_bytes for row in rows if row.path.endswith("query/kernel")] == [
        array_bytes((2, 16, 4, 4), jnp.dtype(dtype))
    ]


def test_backward_pass_saves_no_matrix():
    """Fails if a product saves its dequantised matrix for the gradient."""
    from zjax.ops.rounding import multiply_blocks, quantize_blocks

    codes, scales = quantize_blocks(jnp.ones((64, 32)), 0, 64, "int4")
    _, pull = jax.vjp(lambda x: multiply_blocks(x, codes, scales, 1), jnp.ones((4, 64)))
    saved = {str(x.dtype) for x in jax.tree.leaves(pull) if x.size == codes.size}
    assert saved == {"int4"}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_error_is_half_a_scale(dtype):
    """Fails if codes are cut off, or scales are larger than they must be."""
    from zjax.ops.rounding import dequantize_blocks, quantize_blocks

    kernel = np.random.default_rng(0).normal(size=(3, 16, 5)).astype(np.float32)
    codes, scales = quantize_blocks(jnp.asarray(kernel), 1, 8, dtype)
    assert scales.shape == (3, 2, 5)
    again, steps = rounded(kernel, 1, dtype)
    np.testing.assert_allclose(dequantize_blocks(codes, scales), again, rtol=1e-6)
    error = np.abs(dequantize_blocks(codes, scales) - kernel).reshape(3, 2, 8, 5)
    assert (error <= steps / 2 * (1 + 1e-5)).all() and error.max() > steps.min() / 3
