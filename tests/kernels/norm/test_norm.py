"""Normalisation: both implementations against sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax_kernels import layer_norm, rms_norm
from zjax_kernels.norm import api, mosaic_gpu, reference

AUTO = AxisType.Auto
RNG = np.random.default_rng(0)
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def normalize(x, scale, bias, eps, *, centre):
    mean = x.mean(-1, keepdims=True) if centre else 0.0
    normal = (x - mean) / np.sqrt(np.square(x - mean).mean(-1, keepdims=True) + eps)
    return normal * scale + (0.0 if bias is None else bias)


def gradients(x, scale, d_out, eps, *, centre):
    """By the Jacobian of a row, written out."""
    num = x.shape[-1]
    dx, d_scale = np.empty_like(x), np.zeros_like(scale)
    for row, into, given in zip(x, dx, d_out, strict=True):
        centring = np.eye(num) - (1.0 / num if centre else 0.0)
        centred = centring @ row
        deviation = np.sqrt(np.square(centred).mean() + eps)
        outer = np.outer(centred, centred) / (num * deviation**3)
        jacobian = (np.eye(num) / deviation - outer) @ centring
        into[:] = (given * scale) @ jacobian
        d_scale += given * centred / deviation
    return dx, d_scale, d_out.sum(0)


def make(rows, channels, dtype):
    x, d_out = RNG.normal(size=(2, rows, channels))
    scale, bias = RNG.normal(size=(2, channels))
    narrow = [np.asarray(jnp.asarray(a, dtype)) for a in (0.5 + 2 * x, d_out)]
    return (*narrow, np.float32(scale), np.float32(bias))


def assert_close(found, expected, tolerance):
    found = np.float64(found)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


CASES = [
    ("reference", "float32", 24),
    ("reference", "bfloat16", 256),
    ("mosaic_gpu", "bfloat16", 1024),
    ("mosaic_gpu", "float16", 384),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request, monkeypatch):
    """Passes of an implementation, a dtype and a number of channels."""
    name, dtype, channels = request.param
    if name == "reference":
        return reference.forward, reference.backward, dtype, channels
    monkeypatch.setattr(mosaic_gpu, "_num_programs", lambda *_: 3)  # of five rows
    params = InterpretGPUParams(detect_races=True)
    forward = functools.partial(mosaic_gpu.forward, interpret=params)
    backward = functools.partial(mosaic_gpu.backward, interpret=params)
    return (
        jax.jit(forward, static_argnames=("eps", "centre")),
        jax.jit(backward, static_argnames="centre"),
        dtype,
        channels,
    )


@pytest.mark.parametrize("centre", [True, False], ids=["layer_norm", "rms_norm"])
def test_equals_sums_in_float64(case, centre):
    forward, backward, dtype, channels = case
    x, d_out, scale, bias = make(13, channels, dtype)
    bias = bias if centre else None
    wide = [None if a is None else np.float64(a) for a in (x, d_out, scale, bias)]
    out, *statistics = forward(x, scale, bias, eps=0.1, centre=centre)
    close = functools.partial(assert_close, tolerance=TOLERANCE[dtype])
    expected = normalize(wide[0], wide[2], wide[3], 0.1, centre=centre)
    assert (out.dtype, statistics[0].dtype) == (jnp.dtype(dtype), jnp.float32)
    close(out, expected)
    found = backward(x, *statistics, scale, d_out, centre=centre)
    expected = gradients(wide[0], wide[2], wide[1], 0.1, centre=centre)
    assert found[0].dtype == jnp.dtype(dtype)
    close(found[0], expected[0])
    assert_close(found[1], expected[1], 1e-4)
    if centre:
        assert_close(found[2], expected[2], 1e-4)
    else:
        assert found[2] is None


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("channels", [128, 768, 1280, 4096])
def test_kernels_lower_for_cuda(channels, centre):
    """Fails if a kernel asks for what Mosaic cannot do."""
    x = jax.ShapeDtypeStruct((5, 7, channels), jnp.bfloat16)
    statistic = jax.ShapeDtypeStruct((5, 7, 1), jnp.float32)
    scale = jax.ShapeDtypeStruct((channels,), jnp.float32)
    bias = scale if centre else None
    calls = (
        (functools.partial(mosaic_gpu.forward, eps=1e-5), (x, scale, bias)),
        (mosaic_gpu.backward, (x, statistic, statistic, scale, x)),
    )
    for run, args in calls:
        assert num_kernels(functools.partial(run, centre=centre), *args) == 1


def test_gradients_reach_what_was_given():
    """Fails if one is summed over the wrong rows, or comes in another dtype."""
    x, d_out, scale, bias = make(6, 24, "float32")
    batch = x.reshape(2, 3, 24)
    weights = jnp.float32(scale), jnp.bfloat16(bias)
    found = jax.vjp(layer_norm, batch, *weights)[1](d_out.reshape(2, 3, 24))
    expected = gradients(*map(np.float64, (x, scale, d_out)), 1e-5, centre=True)
    assert [a.dtype for a in found] == [jnp.float32, jnp.float32, jnp.bfloat16]
    for a, b, tolerance in zip(found, expected, (1e-5, 1e-5, 2e-2), strict=True):
        assert_close(a, b.reshape(a.shape), tolerance)


def test_float32_keeps_its_digits_far_from_zero():
    """Fails if the variance is a difference of large numbers."""
    x = np.float32(1000 + RNG.normal(size=(4, 256)))
    scale = np.ones(256, np.float32)
    expected = normalize(np.float64(x), scale, None, 1e-5, centre=True)
    np.testing.assert_allclose(layer_norm(x, scale), expected, atol=1e-3)


def test_float16_keeps_its_digits_far_from_zero():
    x = jnp.tile(jnp.float16([2000, 2001]), (3, 128))
    found = layer_norm(x, jnp.ones(256))
    np.testing.assert_allclose(found, np.tile([-1, 1], (3, 128)), atol=1e-2)


def test_bfloat16_stays_finite_where_it_has_no_digits():
    x = jnp.full((2, 256), 1000, jnp.bfloat16)
    found = layer_norm(x, jnp.ones(256, jnp.bfloat16), eps=1e-12)
    assert np.isfinite(np.float32(found)).all()


def test_auto_takes_the_kernels_for_what_they_can(on_hopper):

    def chosen(shape, dtype=jnp.bfloat16):
        return api._choose("auto", jax.ShapeDtypeStruct(shape, dtype))

    assert chosen((2, 3, 4096)) == "mosaic_gpu"
    others = ((2, 3, 100), (2, 3, 8192), (0, 128), (2, 0))
    assert {chosen(shape) for shape in others} == {"reference"}
    assert chosen((2, 256), jnp.float32) == "reference"
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AUTO,))):
        assert chosen((2, 3, 4096)) == "reference"
        spread = jax.shard_map(
            lambda x: x if chosen(x.shape) == "mosaic_gpu" else None,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        assert jax.eval_shape(spread, jnp.ones((4, 256))).shape == (4, 256)


@pytest.mark.parametrize(
    ("dtype", "channels", "message"),
    [
        (
            "float32",
            128,
            "it needs bfloat16 or float16 and the array is float32; cast it",
        ),
        (
            "bfloat16",
            100,
            "it needs rows of 128, 256, ... 4096 and this is (2, 100); pad the "
            "channels",
        ),
    ],
)
def test_what_kernels_refuse(on_hopper, dtype, channels, message):
    x = jnp.ones((2, channels), dtype)
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message}, or use "
        "implementation='reference'"
    ):
        rms_norm(x, jnp.ones(channels), implementation="mosaic_gpu")
