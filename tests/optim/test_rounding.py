"""Rounding at random against the lists of all numbers, and what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.reference import rounding as reference
from zjax.optim import moments
from zjax.settings import schema
from zjax.sharding import mesh as meshes

CODES = pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8], ids=["int8", "uint8"])


def bits_of(shape, step=0, salt=7):
    return moments.random_bits(shape, jnp.int32(step), salt)


def uniform_of(bits, num_bits):
    """The upper bits as a number from 0 to below 1."""
    return (np.asarray(bits) >> (32 - num_bits)) / 2.0**num_bits


def draw(shape, low, high, signed, seed=0):
    """Sizes spread evenly over the octaves from `2**low` to `2**high`."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(low, high, size=shape)
    return np.float32(size * (rng.choice([-1, 1], size=shape) if signed else 1))


def test_bits_are_even_and_independent_of_element_step_and_array():
    """Each bit of a million words, and each pair of neighbours, is a fair coin."""
    words = np.stack([bits_of((500, 500), step, salt) for step, salt in SEEDS])
    bits = np.unpackbits(words.view(np.uint8)).reshape(*words.shape, 32)
    assert abs(bits.mean((0, 1, 2)) - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)
    for axis in (0, 1, 2):
        after = np.roll(bits, -1, axis)
        same = (bits == after).mean((0, 1, 2))
        assert abs(same - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)
    assert len(np.unique(words[0])) > 0.9999 * words[0].size


SEEDS = [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_bits_are_those_of_one_device_on_every_mesh():
    mesh = meshes.make_mesh(schema.Mesh())
    whole = bits_of((24, 16, 5), step=3)
    for spec in (P("data"), P(None, "data")):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        split = jax.jit(lambda: bits_of((24, 16, 5), step=3), out_shardings=sharding)
        np.testing.assert_array_equal(split(), whole)
        assert "all-" not in split.lower().compile().as_text()


def test_bfloat16_equals_the_oracle():
    x = draw((64, 64), -60, 60, signed=True)
    bits = bits_of(x.shape)
    numbers = reference.bfloat16_numbers()
    index = reference.round_at_random(abs(x), numbers, uniform_of(bits, 16))
    got = moments.round_to_bfloat16(jnp.array(x), bits)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float64(got), np.sign(x) * numbers[index])


def test_bfloat16_keeps_what_it_can_write():
    x = jnp.array([0.0, -1.5, 2.0**-126, jnp.inf], jnp.bfloat16)
    for step in range(20):
        got = moments.round_to_bfloat16(x.astype(jnp.float32), bits_of((4,), step))
        np.testing.assert_array_equal(got, x)


def quantized(x, step=0, dtype=jnp.int8):
    """With one scale of 1 for all, so that codes are of `x` itself."""
    scales = (jnp.ones((1,) * x.ndim),)
    return moments.quantize(jnp.array(x), scales, bits_of(x.shape, step), dtype)


@CODES
def test_eight_bits_equal_the_oracle(dtype):
    signed = dtype == jnp.int8
    x = draw((64, 64), -15 if signed else -31, 0, signed)
    got = quantized(x, dtype=dtype)
    numbers = reference.eight_bit_numbers(signed)
    bits = bits_of(x.shape)
    index = reference.round_at_random(abs(x), numbers, uniform_of(bits, 20))
    assert got.codes.dtype == dtype
    np.testing.assert_array_equal(got.codes, np.sign(x) * index)
    np.testing.assert_array_equal(moments.dequantize(got), np.sign(x) * numbers[index])
    assert abs(moments.dequantize(got) / x - 1).max() < 1 / 8


@CODES
def test_every_code_is_a_number_that_is_kept(dtype):
    signed = dtype == jnp.int8
    numbers = reference.eight_bit_numbers(signed).astype(np.float32)
    x = np.concatenate([-numbers[:0:-1], numbers]) if signed else numbers
    got = quantized(x, dtype=dtype)
    np.testing.assert_array_equal(moments.dequantize(got), x)
    assert len(np.unique(got.codes)) == (255 if signed else 256)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "uint8"])
def test_mean_of_many_roundings_is_the_number(kind):
    """Fails if rounding has a bias: to the nearest, towards zero or away from it."""
    num_steps = 2_000
    x = draw((32,), -18 if kind == "int8" else -14, 0, signed=kind != "uint8")

    def rounded(step):
        bits = moments.random_bits(x.shape, step, 3)
        if kind == "bfloat16":
            return moments.round_to_bfloat16(jnp.array(x), bits).astype(jnp.float32)
        scales = (jnp.ones((1,)),)
        got = moments.quantize(jnp.array(x), scales, bits, jnp.dtype(kind))
        return moments.dequantize(got)

    values = np.float64(jax.vmap(rounded)(jnp.arange(num_steps)))
    deviation = values.std(0) / np.sqrt(num_steps)
    assert (abs(values.mean(0) - x) <= 5 * deviation + 1e-7 * abs(x)).all()
    assert (values.std(0) > 0).mean() > 0.9


def test_signed_codes_go_on_below_their_range_and_unsigned_never_become_zero():
    tiny = np.full((4_000,), 2.0**-18, np.float32)
    signed = np.asarray(moments.dequantize(quantized(tiny)))
    smallest = reference.eight_bit_numbers(True)[1]
    assert set(signed) == {0.0, np.float32(smallest)}
    np.testing.assert_allclose(signed.mean(), 2.0**-18, rtol=0.1)
    for size in (2.0**-40, 1e-30):
        unsigned = quantized(np.full((100,), size, np.float32), dtype=jnp.uint8)
        assert set(np.asarray(unsigned.codes)) == {1}
    assert quantized(np.zeros((3,), np.float32), dtype=jnp.uint8).codes.max() == 0


def test_scale_is_the_smaller_of_row_and_column():
    """Each number is measured by its own row and column, and by no other layer."""
    rng = np.random.default_rng(4)
    rows, columns = 10.0 ** rng.uniform(-6, 0, (2, 2, 32))
    x = rng.normal(size=(2, 32, 32)) * rows[..., :, None] * columns[..., None, :]
    x = np.float32(x)
    scales = tuple(
        moments.measure(jnp.array(x), shape) for shape in [(2, 32, 1), (2, 1, 32)]
    )
    np.testing.assert_array_equal(scales[0], abs(x).max(2, keepdims=True))
    np.testing.assert_array_equal(scales[1], abs(x).max(1, keepdims=True))
    got = moments.quantize(jnp.array(x), scales, bits_of(x.shape), jnp.int8)
    smaller = np.minimum(abs(x).max(2, keepdims=True), abs(x).max(1, keepdims=True))
    relative = abs(np.asarray(moments.dequantize(got)) - x) / smaller
    assert relative.max() < 1 / 8
    kept = abs(x) > smaller * 2.0**-15
    assert (abs(moments.dequantize(got) / x - 1)[kept] < 1 / 8).all()
    assert kept.mean() > 0.9


def test_row_and_column_of_zeros_stay_zero():
    x = jnp.zeros((4, 4)).at[1:, 1:].set(1.0)
    scales = moments.measure(x, (4, 1)), moments.measure(x, (1, 4))
    got = moments.quantize(x, scales, bits_of(x.shape), jnp.uint8)
    np.testing.assert_array_equal(moments.dequantize(got), x)


@pytest.mark.parametrize("kind", ["bfloat16", "uint8"])
def test_slow_decay_stalls_to_the_nearest_and_not_at_random(kind):
    """A second moment under b2 = 0.999 without gradients, for 1,000 steps."""
    shape, decay, num_steps = (64, 64), np.float32(0.999), 1_000
    middle = jnp.full(shape, 1 << 31, jnp.uint32)  # rounds up from the middle on

    def step(value, count, bits):
        value = value * decay
        if kind == "bfloat16":
            return moments.round_to_bfloat16(value, bits).astype(jnp.float32)
        scales = (jnp.ones((1, 1)),)
        return moments.dequantize(moments.quantize(value, scales, bits, jnp.uint8))

    def nearest(value, count):
        return step(value, count, middle), None

    def at_random(value, count):
        return step(value, count, moments.random_bits(shape, count, 0)), None

    steps = jnp.arange(num_steps)
    stalled, _ = jax.jit(lambda x: jax.lax.scan(nearest, x, steps))(jnp.ones(shape))
    moved, _ = jax.jit(lambda x: jax.lax.scan(at_random, x, steps))(jnp.ones(shape))
    np.testing.assert_array_equal(stalled, 1.0)
    np.testing.assert_allclose(moved.mean(), 0.999**1_000, rtol=0.03)
