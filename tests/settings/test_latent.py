"""Settings of latents of attention, with the exact words of each refusal."""

import pytest

from tests.support.refusals import case, refusal
from zjax.config import check_config, load_config
from zjax.settings import schema

ON = "model.latent.key_rank=16;"
SIZES = ON + "model.latent.plain_size=8;model.latent.value_size=8;model.rotary_size=4;"
WHOLE = SIZES + "model.positions=rotary;model.use_bias=False;"

RULES = [
    case(
        ON + "model.positions=rotary;model.use_bias=False",
        "model.rotary_size=0 is missing beside model.latent; give the channels of a "
        "head that rotate",
        id="sizes",
    ),
    case(
        WHOLE + "model.latent.key_rank=-1",
        "model.latent.key_rank=-1 is out of range; use 1 or more",
        id="no-channels",
    ),
    case(
        WHOLE + "model.latent.value_size=13",
        "model.latent.value_size=13 exceeds model.head_size=12; use at most 12",
        id="wide-values",
    ),
    case(
        WHOLE + "model.head_size=16",
        "model.head_size=16 is not the 12 of model.latent.plain_size and "
        "model.rotary_size; use 0",
        id="another-head-size",
    ),
    case(
        SIZES + "model.num_kv_heads=4;model.query_key_norm=True;"
        "model.attention_sinks=True",
        "model.rotary_size=4 has no effect with model.positions='learned'; leave it at "
        "0, or set model.positions to 'rotary'\n"
        "model.positions='learned' rotates no channels, as model.latent needs; use "
        "'rotary'\n"
        "model.num_kv_heads=4 is not model.num_heads=12, as model.latent needs; use 0\n"
        "model.use_bias=True adds biases to queries, keys and values, which "
        "model.latent has not; use model.attention_bias='none'\n"
        "model.query_key_norm=True is not built for model.latent; use False\n"
        "model.attention_sinks=True is not built for model.latent; use False",
        id="what-latents-have-not",
    ),
    case(
        WHOLE + "model.attention_bias=inputs",
        "model.attention_bias='inputs' adds biases to queries, keys and values, which "
        "model.latent has not; use model.attention_bias='none'",
        id="biases-of-inputs",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_heads_have_the_channels_of_latents():
    """Fails if `embed_size` over `num_heads` counts, or heads must divide it."""
    config = load_config({}, *WHOLE.strip(";").split(";"), "model.num_heads=5")
    check_config(config, 1)
    model = config.model
    assert (model.head_size, model.value_size, model.num_kv_heads) == (12, 8, 5)
    assert schema.Model().value_size == 64
