"""What is refused of the sequence axis, with the exact words that a user reads."""

import pytest

from tests.support.refusals import case, refusal
from zjax import config as zconfig

CASES = [
    case(
        "mesh.sequence=8;data.length=1020",
        "data.length=1020 is not a multiple of 16, twice mesh.sequence=8, as causal "
        "ring attention needs; use 1008 or 1024",
        id="length-of-a-ring",
    ),
    case(
        "mesh.sequence=4;data.length=1022",
        "data.length=1022 is not a multiple of mesh.sequence=4; use 1020 or 1024",
        id="length-of-ulysses",
    ),
    case(
        "mesh.sequence=8;data.length=1020;model.kind=encoder",
        "data.length=1020 is not a multiple of mesh.sequence=8; use 1016 or 1024",
        id="length-of-an-encoder",
    ),
    case(
        "mesh.sequence=4;mesh.tensor=2;model.sequence_attention=ulysses",
        "model.sequence_attention='ulysses' cannot split model.num_heads=12 over "
        "mesh.tensor * mesh.sequence=8; use 'ring', or a multiple of 8 heads",
        id="heads-of-ulysses",
    ),
    case(
        "mesh.sequence=8;model.attention=sparse;model.sequence_attention=ulysses",
        "model.sequence_attention='ulysses' cannot split model.num_heads=12 over "
        "mesh.tensor * mesh.sequence=8; use 'halo', or a multiple of 8 heads",
        id="heads-of-sparse",
    ),
    case(
        "mesh.sequence=8;model.attention=sparse;data.length=960",
        "data.length=960 is not a multiple of 1024, 128 tokens for each of "
        "mesh.sequence=8, as sparse attention by halos needs; use 1024",
        id="length-of-halos",
    ),
    case(
        "mesh.sequence=4;model.sequence_attention=halo",
        "model.sequence_attention='halo' needs a sparsity pattern, which "
        "model.attention='auto' lacks; use 'auto', or model.attention='sparse'",
        id="halo-of-dense",
    ),
    case(
        "mesh.sequence=4;model.attention=cudnn;model.sequence_attention=ring",
        "model.sequence_attention='ring' never gathers the whole sequences that "
        "model.attention='cudnn' needs; use 'ulysses', or model.attention='auto'",
        id="ring-of-cudnn",
    ),
    case(
        "mesh.sequence=-1;mesh.data=1;model.attention=cudnn",
        "model.attention='cudnn' needs whole sequences and cannot split "
        "model.num_heads=12 over mesh.tensor * mesh.sequence=8; use 'auto', or a "
        "multiple of 8 heads",
        id="heads-of-cudnn",
    ),
    case(
        "mesh.sequence=4;model.attention=sparse;model.sequence_attention=ring",
        "model.sequence_attention='ring' never gathers the whole sequences that "
        "model.attention='sparse' needs; use 'halo' or 'ulysses', or "
        "model.attention='auto'",
        id="ring-of-sparse",
    ),
    case(
        "model.sequence_attention=ring",
        "model.sequence_attention='ring' has no effect with mesh.sequence=1; leave it "
        "at 'auto', or set mesh.sequence above 1",
        id="no-axis",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), CASES)
def test_what_cannot_be_split_is_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.sequence=4"],
        ["mesh.sequence=8"],
        ["mesh.sequence=8", "model.sequence_attention=ring"],
        ["mesh.sequence=4", "model.attention=sparse"],
        ["mesh.sequence=8", "model.attention=sparse"],
        ["mesh.sequence=4", "model.attention=sparse", "model.sequence_attention=halo"],
        ["mesh.sequence=-1", "mesh.data=2", "model.kind=encoder"],
    ],
    ids=" ".join,
)
def test_what_divides_can_work(overrides):
    zconfig.check_config(zconfig.load_config({}, *overrides), num_devices=8)
