"""Settings of rotary positions and of norms, with the exact words of each refusal."""

import pytest

from tests.support.refusals import case, refusal

ROTARY = "model.positions=rotary;"
SCALING = "model.rope_scaling."

RULES = [
    case(
        ROTARY + "model.rotary_size=66",
        "model.rotary_size=66 exceeds the 64 channels of a head; use at most 64, or 0",
        id="more-than-there-are",
    ),
    case(
        ROTARY + "model.rotary_size=5",
        "model.rotary_size=5 is odd, and channels rotate in pairs; make it even",
        id="odd",
    ),
    case(
        ROTARY + f"{SCALING}kind=llama3;{SCALING}high_frequency_factor=0.5",
        "model.rope_scaling.original_length=0 is missing for kind='llama3'; give the "
        "longest sequence of the training before\n"
        "model.rope_scaling.high_frequency_factor=0.5 is not above "
        "low_frequency_factor=1.0; raise it",
        id="llama3",
    ),
    case(
        ROTARY
        + f"{SCALING}kind=yarn;{SCALING}original_length=8;{SCALING}beta_slow=32.0;"
        + "model.rope_theta=1.0",
        "model.rope_theta=1.0 gives channels no wavelengths, which yarn compares; use "
        "more than 1\n"
        "model.rope_scaling.beta_fast=32.0 is not above beta_slow=32.0; raise it",
        id="yarn",
    ),
    case(
        ROTARY
        + f"{SCALING}kind=dynamic;{SCALING}original_length=8;model.rotary_size=2",
        "model.rope_scaling='dynamic' needs more than the 2 channels of a head "
        "that rotate; use 'linear'",
        id="dynamic",
    ),
    case(
        ROTARY
        + f"model.rotary_size=4;{SCALING}kind=longrope;{SCALING}original_length=8;"
        + f"{SCALING}short_factors=1.0,0.0;{SCALING}long_factors=1.0,2.0,3.0",
        *(
            "model.rope_scaling.short_factors=(1.0, 0.0) is not 2 numbers above 0, one "
            "for each pair of channels that rotate; correct it\n"
            "model.rope_scaling.long_factors=(1.0, 2.0, 3.0) is not 2 numbers above 0, "
            "one for each pair of channels that rotate; correct it",
        ),
        id="longrope",
    ),
    case(
        ROTARY
        + f"model.rotary_size=4;{SCALING}kind=longrope;{SCALING}original_length=1;"
        + f"{SCALING}short_factors=1.0,1.0;{SCALING}long_factors=1.0,2.0",
        "model.rope_scaling.original_length=1 gives no factor of queries and keys, "
        "which divides by its logarithm; use 2 or more",
        id="longrope-of-one-token",
    ),
    *(
        case(
            ROTARY + f"{SCALING}kind=yarn;{SCALING}original_length=8;"
            f"{SCALING}mscale=0.7;{other}",
            f"model.rope_scaling.mscale=0.7 has no effect with {why}; leave it at 0.0",
            id=f"mscale-{why}",
        )
        for other, why in (
            (f"{SCALING}factor=2.0", "mscale_all_dim=0.0"),
            (
                f"{SCALING}mscale_all_dim=1.0;{SCALING}attention_factor=2.0",
                "attention_factor=2.0",
            ),
        )
    ),
    case(
        ROTARY + f"{SCALING}factor=2.0",
        "model.rope_scaling.factor=2.0 has no effect with model.rope_scaling=None; "
        "leave it out, or set model.rope_scaling to 'linear' or 'dynamic' or 'yarn' or "
        "'llama3' or 'longrope'",
        id="no-kind",
    ),
    case(
        f"{SCALING}kind=linear",
        "model.rope_scaling='linear' has no effect with model.positions='learned'; "
        "leave it at None, or set model.positions to 'rotary'",
        id="learned",
    ),
    case(
        "model.query_key_norm=True;model.query_key_norm_scope=heads;mesh.tensor=8",
        "mesh.tensor=8 does not divide model.num_heads=12, as "
        "query_key_norm_scope='heads' needs; use 1, 2 or 4",
        id="norm-over-padded-heads",
    ),
    case(
        "model.norm_position=output;model.mlp_tiles=2",
        "model.mlp_tiles=2 adds to the residual stream tile by tile, and "
        "model.norm_position='output' normalises the sum; use 1, or 'input' there",
        id="tiles-of-normalised-outputs",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message
