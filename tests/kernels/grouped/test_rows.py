"""Copies of rows to their places: plain JAX, the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from zjax_kernels import copy_rows, device
from zjax_kernels.grouped import mosaic_gpu


def operands(num_tokens, num_copies=2, num_rows=None, width=128):
    """Rows in a random order; those beyond `num_rows` are left out."""
    rng = np.random.default_rng(0)
    places = rng.permutation(num_tokens * num_copies).astype(np.int32)
    sources = np.argsort(places).astype(np.int32) // num_copies
    x = jnp.asarray(rng.normal(size=(num_tokens, width)), jnp.bfloat16)
    targets = jnp.asarray(places.reshape(num_tokens, num_copies))
    return x, jnp.asarray(sources[:num_rows]), targets


def test_the_kernel_copies_each_row_to_its_places(capfd, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.matmul, "_BATCH_BYTES", 512)
    x, sources, targets = operands(num_tokens=24, num_rows=40)
    run = functools.partial(
        mosaic_gpu.copy_rows, interpret=InterpretGPUParams(detect_races=True)
    )
    found = jax.jit(run)(x, sources, targets)
    np.testing.assert_array_equal(found, x[sources])
    np.testing.assert_array_equal(found, copy_rows(x, sources, targets))
    assert "RACE" not in "".join(capfd.readouterr())


def test_rows_need_not_fill_the_last_batch(monkeypatch):
    """It copies rows of the batch before again, which the interpreter calls a race."""
    monkeypatch.setattr(mosaic_gpu.matmul, "_BATCH_BYTES", 1024)
    x, sources, targets = operands(num_tokens=7)
    run = functools.partial(mosaic_gpu.copy_rows, interpret=InterpretGPUParams())
    np.testing.assert_array_equal(jax.jit(run)(x, sources, targets), x[sources])


@pytest.mark.parametrize("width", [128, 4096, 32768])
def test_rows_of_every_width_lower_for_cuda(width):
    arrays = operands(num_tokens=20, width=width)
    traced = jax.jit(mosaic_gpu.copy_rows).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_rows_with_many_places_are_gathered(monkeypatch):
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    x, sources, targets = operands(num_tokens=4, num_copies=17)
    np.testing.assert_array_equal(copy_rows(x, sources, targets), x[sources])
    with pytest.raises(ValueError, match="at most 16 places of a row, not 17; gather"):
        copy_rows(x, sources, targets, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (
            64,
            "bfloat16",
            "it needs rows of 128, 256, ... 32768 numbers, not (8, 64); pad or split",
        ),
        (128, "float32", "it needs bfloat16 or float16 and the rows are float32; cast"),
    ],
)
def test_what_the_kernel_cannot_copy_is_refused(monkeypatch, width, dtype, message):
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    x, sources, targets = operands(num_tokens=8, width=width)
    with pytest.raises(ValueError) as error:
        copy_rows(x.astype(dtype), sources, targets, implementation="mosaic_gpu")
    assert str(error.value) == (
        f"implementation=mosaic_gpu cannot run: {message} them, or use "
        "implementation='reference'"
    )
