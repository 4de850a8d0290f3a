"""Settings that cannot work are refused in the words of `tests/golden/refusals`."""

import pytest

from tests.support.refusals import listed, refusal
from zjax import config as zconfig

BIAS = "model.moe.num_experts=4;model.moe.top_k=2;model.moe.bias_rate=0.01"
PYRAMID = f"{BIAS};model.num_layers=3;model.moe.num_experts=(4,4,8)"


REFUSALS = listed("settings/*.txt")


@pytest.mark.parametrize(("overrides", "message"), REFUSALS.items(), ids=REFUSALS)
def test_settings_that_cannot_work_are_refused(overrides, message):
    assert refusal(overrides.split("; ")) == message


@pytest.mark.parametrize(
    "overrides",
    [
        "mesh.sequence=4",
        "mesh.sequence=8;model.sequence_attention=ring",
        "mesh.sequence=4;model.attention=sparse",
        "mesh.sequence=8;model.attention=sparse",
        "mesh.sequence=4;model.attention=sparse;model.sequence_attention=halo",
        "mesh.sequence=-1;mesh.data=2;model.kind=encoder",
        "mesh.pipeline=4",
        "mesh.pipeline=4;mesh.data=2;model.num_layers=5",
        "mesh.pipeline=2;pipeline=interleaved;num_microbatches=4",
        "mesh.pipeline=2;pipeline=zb_h1;model.remat=none",
        "model.attention=sparse",
        f"{PYRAMID};lora.rank=4;lora.also_train=['router/bias']",
        f"{PYRAMID};lora.rank=4;lora.also_train=['segment0.*bias$','segment1.*bias$']",
        f"{BIAS};optimizer.groups=[{{'pattern':'router/bias'}},{{'pattern':'mlp','learning_rate_scale':0.0}}]",
        "model.moe.num_experts=4;model.moe.top_k=2;model.moe.choice_bias=True;lora.rank=4",
    ],
)
def test_settings_that_work_are_accepted(overrides):
    config = zconfig.load_config({}, *overrides.split(";"))
    zconfig.check_config(config, num_devices=8)
