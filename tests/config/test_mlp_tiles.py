"""Every rule about tiles and chunks of a feed-forward, with the exact words."""

import pytest

from tests.support.refusals import case, refusal

RULES = [
    case(
        "model.mlp_tiles=0",
        "model.mlp_tiles=0 is out of range; use 1 or more",
        id="none",
    ),
    case(
        "model.mlp_tiles=5",
        "model.mlp_tiles=5 does not divide model.mlp_size=3072; use a divisor of 3072",
        id="uneven",
    ),
    case(
        "model.kind=encoder;model.mlp_tiles=2",
        "model.mlp_tiles=2 adds to the residual stream tile by tile, and "
        "model.kind='encoder' normalises the sum; use 1, or a decoder",
        id="encoder",
    ),
    case(
        "model.mlp_tiles=2;optimizer.rule=muon",
        "model.mlp_tiles=2 makes each tile a separate matrix to "
        "optimizer.rule='muon'; use 1, or adamw, adam, lion or sgd",
        id="optimizer-of-matrices",
    ),
    case(
        "model.remat=full;model.mlp_chunk_tokens=-1",
        "model.mlp_chunk_tokens=-1 is out of range; use 0 or more",
        id="negative-chunk",
    ),
    case(
        "model.mlp_chunk_tokens=64",
        "model.mlp_chunk_tokens=64 has no effect with model.remat='elementwise'; leave "
        "it at 0, or set model.remat to 'attention' or 'full'",
        id="chunks-kept",
    ),
    case(
        "model.mlp_chunk_tokens=64;model.remat=full;model.mlp_tiles=2",
        "model.mlp_chunk_tokens=64 is not built for model.mlp_tiles=2; use 0, or 1 "
        "there",
        id="chunks-of-tiles",
    ),
    case(
        "model.mlp_chunk_tokens=64;model.remat=full;precision.matmul_dtype=float8",
        "model.mlp_chunk_tokens=64 is not built for precision.matmul_dtype='float8'; "
        "use 0, or 'compute' there",
        id="chunks-in-float8",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message
