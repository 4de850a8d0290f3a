"""What codecs send, and how near the restored vector is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.errors import ConfigError
from zjax.ops.codecs import make_codec, packed_bytes

NAMES = ("float32", "bfloat16", "int8", "float8", "int4", "int2", "onebit", "top_k")


@pytest.mark.parametrize(
    ("name", "codes", "restored"),
    [
        ("int8", [13, -64, 32, 127], [0.1015625, -0.5, 0.25, 0.9921875]),
        ("int4", [0xC1, 0x72], [0.125, -0.5, 0.25, 0.875]),
    ],
)
def test_integers_of_blocks_are_the_published_ones(name, codes, restored):
    """Vectors of appendix A.3."""
    codec = dataclasses.replace(make_codec(name), block=4)
    packed = codec.encode(jnp.array([0.1, -0.5, 0.25, 1.0]))
    assert packed[0].tolist() == codes
    assert codec.decode(packed).tolist() == restored


def test_two_bits_are_a_sign_and_one_of_two_magnitudes():
    """The first of four codes is the lowest; magnitudes from 1.25 on are high."""
    codec = dataclasses.replace(make_codec("int2"), block=8)
    packed = codec.encode(jnp.array([0.5, -0.5, 2.0, -1.25, 0.25, 1.25, -1.5, 0.75]))
    codes, scales = packed
    assert codes.tolist() == [0b11_01_10_00, 0b00_11_01_00]
    assert scales.tolist() == [0.5, 1.5]
    expected = [0.5, -0.5, 1.5, -1.5, 0.5, 1.5, -1.5, 0.5]
    assert codec.decode(packed).tolist() == expected


@pytest.mark.parametrize(
    ("x", "packed", "scale"),
    [
        (np.arange(16) - 4.0, [15, 255], 5.787918451395113),
        (np.arange(16) % 5 - 1.5, [57, 206], 1.5),
    ],
)
def test_signs_are_packed_as_published(x, packed, scale):
    """Vectors of appendix A.1."""
    codec = dataclasses.replace(make_codec("onebit"), block=16)
    bits, scales = codec.encode(jnp.asarray(x, jnp.float32))
    assert bits.tolist() == packed
    np.testing.assert_allclose(scales, [scale], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", 4 * 8192),
        ("bfloat16", 2 * 8192),
        ("int8", 8192 + 4 * 4),
        ("float8", 8192 + 4 * 4),
        ("int4", 4096 + 4 * 4),
        ("int2", 2048 + 4 * 4 * 2),
        ("onebit", 1024 + 4 * 2),
        ("top_k", 2 * (2 * 64 + 2 * 4)),
    ],
)
def test_bytes_on_the_wire(name, expected):
    assert packed_bytes(make_codec(name), 8192) == expected


@functools.partial(jax.jit, static_argnums=0)
def send(codec, x):
    return codec.decode(codec.encode(x))


def restored(codec, x):
    return np.float64(send(codec, jnp.asarray(x, jnp.float32)))


def vectors(size):
    """Blocks of 64 numbers of very different magnitude, some of them zeros."""
    for seed in range(8):
        generator = np.random.default_rng(seed)
        x = generator.standard_t(3, (size // 64, 64))
        x *= 10.0 ** generator.integers(-25, 18, (size // 64, 1))
        x[seed::5] = 0
        yield x.astype(np.float32).reshape(-1)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_half_a_unit_off(bits):
    """A whole unit at the positive maximum, whose code is the next lower one."""
    codec = dataclasses.replace(make_codec(f"int{bits}"), block=64)
    for x in vectors(640):
        blocks, found = (np.float64(a).reshape(-1, 64) for a in (x, restored(codec, x)))
        unit = np.abs(blocks).max(axis=1, keepdims=True) / 2 ** (bits - 1)
        is_clipped = blocks > (2 ** (bits - 1) - 1) * unit
        error = np.abs(blocks - found)
        assert (error <= np.where(is_clipped, unit, unit / 2) * (1 + 1e-5)).all()
        assert (error[is_clipped] > 0).any()


def test_two_bits_lose_as_little_as_published():
    """Of normal numbers 12 % of the squares; fails if all have one magnitude (36 %)."""
    x = np.random.default_rng(0).normal(0, 1e-3, 16 * 2048).astype(np.float32)
    lost = np.square(x - restored(make_codec("int2"), x)).sum() / np.square(x).sum()
    assert 0.115 < lost < 0.125


def test_two_bits_lose_less_than_there_was():
    codec = dataclasses.replace(make_codec("int2"), block=64)
    for x in vectors(640):
        blocks, found = (np.float64(a).reshape(-1, 64) for a in (x, restored(codec, x)))
        lost = np.linalg.norm(blocks - found, axis=1)
        assert (lost <= np.linalg.norm(blocks, axis=1) * 0.9).all()


def test_float8_is_an_eighth_of_a_binade_off():
    codec = dataclasses.replace(make_codec("float8"), block=64)
    for x in vectors(640):
        blocks, found = (np.float64(a).reshape(-1, 64) for a in (x, restored(codec, x)))
        smallest = np.abs(blocks).max(axis=1, keepdims=True) / 448 * 2**-9
        bound = np.maximum(np.abs(blocks) * 2**-4, smallest / 2) * (1 + 1e-5)
        assert (np.abs(blocks - found) <= bound).all()


def test_signs_keep_the_norm():
    codec = dataclasses.replace(make_codec("onebit"), block=64)
    for x in vectors(640):
        blocks, found = (np.float64(a).reshape(-1, 64) for a in (x, restored(codec, x)))
        norms = np.linalg.norm(blocks, axis=1, keepdims=True)
        signs = np.where(blocks >= 0, 1, -1)
        # A square below the smallest float32 counts as 0.
        np.testing.assert_allclose(found, signs * norms / 8, rtol=1e-5, atol=1e-19)


def test_the_largest_numbers_of_each_block_are_kept():
    """As two magnitudes, so that what is lost is smaller than what was there."""
    codec = dataclasses.replace(make_codec("top_k"), block=64, kept=5)
    for x in vectors(640):
        blocks, found = (np.float64(a).reshape(-1, 64) for a in (x, restored(codec, x)))
        for block, result in zip(blocks, found, strict=True):
            largest = np.argsort(-np.abs(block))[:5]
            assert set(np.flatnonzero(result)) == (
                set(largest) if block.any() else set()
            )
            np.testing.assert_array_equal(
                np.sign(result[largest]), np.sign(block[largest])
            )
            assert len(set(np.abs(result[largest]))) <= 2
            kept, lost = block[largest], np.linalg.norm(block - result)
            np.testing.assert_allclose(np.abs(result).sum(), np.abs(kept).sum())
            assert lost <= np.linalg.norm(block)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name):
    codec = make_codec(name)
    assert not restored(codec, np.zeros(codec.block)).any()


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "float8", "onebit", "top_k"])
def test_a_block_of_zeros_beside_others_stays_zero(name):
    codec = make_codec(name)
    x = np.r_[np.zeros(codec.block), np.ones(codec.block)]
    found = restored(codec, x).reshape(2, -1)
    assert not found[0].any() and found[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_magnitude_is_restored_as_something_else(name):
    """Neither infinite where it was finite, unless to say so, nor larger."""
    codec = make_codec(name)
    for magnitude in (1e-45, 1e-38, 1e-30, 3e38):
        x = np.full(codec.block, magnitude, np.float32)
        found = restored(codec, x)
        if name == "onebit" and magnitude > 1:
            assert not np.isfinite(found).any()  # its square overflows
        else:
            assert (np.abs(found) <= x * 1.01).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_not_hidden(name):
    codec = make_codec(name)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.random.default_rng(0).normal(0, 1, codec.block).astype(np.float32)
        x[-1] = bad
        assert not np.isfinite(restored(codec, x)).all()


def test_an_unknown_codec_is_named():
    with pytest.raises(ConfigError) as error:
        make_codec("int3")
    assert str(error.value) == (
        "codec='int3' does not exist; use one of float32, bfloat16, int8, float8, "
        "int4, int2, onebit, top_k"
    )
