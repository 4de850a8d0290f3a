"""Sums of integers hold the gradients of queries, and count finely enough."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live
from zjax_kernels.sparse import BlockLayout
from zjax_kernels.sparse.mosaic_gpu import sums


def inputs_of_one_key():
    """The value lies along the gradient, so that the bound is reached."""
    rng = np.random.default_rng(0)
    k, v, d_out = (rng.normal(size=(2, 1, 3, 64)) for _ in range(3))
    v = d_out * [[[[2.0]]], [[[-3.0]]]]
    return tuple(x.astype(np.float32) for x in (k, v, d_out))


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e9])
def test_the_largest_gradient_fits_in_an_integer(scale):
    """Fails if a sum overflows, or if a bit more than the spare one goes unused."""
    k, v, d_out = inputs_of_one_key()
    k = k * np.float32(scale)
    dp = (d_out * v).sum(axis=-1)
    delta = (-np.sign(dp) * 5).swapaxes(1, 2)
    unit = np.asarray(sums.find_unit(k, v, d_out, delta))
    largest = abs((dp - delta.swapaxes(1, 2))[..., None] * k).max(axis=-1)
    counted = largest.swapaxes(1, 2) / unit
    np.testing.assert_allclose(counted, 2.0**30, rtol=1e-3)


def test_units_are_of_each_query_and_of_the_keys_of_its_group():
    layout = BlockLayout.from_dense(random_live((4, 4, 4)), block=32)
    k, v, d_out = (
        np.array(x)
        for x in make_inputs(layout, batch=1, num_kv_heads=2, head_size=64)[1:4]
    )
    delta = np.zeros((1, 4, 128), np.float32)
    unit = np.asarray(sums.find_unit(k, v, d_out, delta))
    k[:, 5, 1] *= 2**10
    d_out[:, 7, 0] *= 2**3
    changed = np.asarray(sums.find_unit(k, v, d_out, delta)) / unit
    assert (changed[:, :2, :7] == 1).all()
    np.testing.assert_allclose(changed[0, 0, 7], 2**3, rtol=1e-5)
    assert (changed[:, 2:] > 2**8).all()


def test_rounding_is_finer_than_that_of_the_result():
    """Fails if integers count more coarsely than bfloat16 does, row by row."""
    layout = BlockLayout.from_dense(np.ones((32, 32), bool), block=32, num_heads=1)
    q, k, v, d_out, _ = make_inputs(layout, batch=1, head_size=64)
    out, _ = attend(q, k, v, mask_of(layout))
    delta = jnp.einsum("bshd,bshd->bhs", out, d_out)
    unit = np.asarray(sums.find_unit(k, v, d_out, delta))[0, 0]
    p = np.exp(np.einsum("qd,kd->qk", q[0, :, 0], k[0, :, 0]) / 8)
    p /= p.sum(axis=1, keepdims=True)
    ds = p * (np.einsum("qd,kd->qk", d_out[0, :, 0], v[0, :, 0]) - delta[0, 0][:, None])
    dq = np.abs(ds @ k[0, :, 0]).mean(axis=1)
    assert (8 * unit < dq * 2.0**-12).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_is_not_hidden(value):
    k, v, d_out = inputs_of_one_key()
    delta = np.zeros((2, 3, 1), np.float32)
    d_out[1, 0, 2, 7] = value
    unit = np.asarray(sums.find_unit(k, v, d_out, delta))
    assert not np.isfinite(unit[1, 2, 0])
    assert np.isfinite(unit).sum() == unit.size - 1
