"""What codecs send, and how near the restored vector is."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from zjax.comm.codecs import make_codec, packed_bytes


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


@pytest.mark.parametrize(
    ("x", "packed", "scale"),
    [
        (np.arange(16) - 4.0, [15, 255], 5.787918451395113),
        (np.arange(16) % 5 - 1.5, [57, 206], 1.5),
    ],
)
def test_signs_are_packed_as_published(x, packed, scale):
    """Vectors of appendix A.1."""
    bits, scales = make_codec("onebit").encode(jnp.asarray(x, jnp.float32))
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
        ("onebit", 1024 + 4),
        ("top_k", 2 * (2 * 64 + 2 * 4)),
    ],
)
def test_bytes_on_the_wire(name, expected):
    assert packed_bytes(make_codec(name), 8192) == expected
