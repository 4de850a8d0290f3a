"""FLOPs of runs that freeze some of the weights."""

import pytest

from zjax.config import load_config
from zjax.estimate.activations import flops_per_weight
from zjax.models.flops import matmul_params

HALF_FROZEN = {
    "adapters-beside-the-head": {"lora": {"rank": 8, "also_train": ["^head/kernel"]}},
    "groups": {
        "optimizer.groups": [
            {"pattern": "^head", "learning_rate_scale": 2.0},
            {"pattern": ".", "learning_rate_scale": 0.0},
        ]
    },
}


@pytest.mark.parametrize("settings", HALF_FROZEN.values(), ids=HALF_FROZEN)
def test_gradients_of_trained_weights_count(settings):
    """Fails if all weights count as those of the blocks, which are frozen."""
    model = {"model": {"tied_head": False, "norm": "rms_norm", "vocab_size": 60_000}}
    config = load_config(model | settings)
    trained = 60_000 * 768 + 768 * ("optimizer.groups" in settings)
    expected = 4 + 2 * trained / matmul_params(config.model)
    assert flops_per_weight(config) == pytest.approx(expected, rel=1e-9)


def test_frozen_masters_have_gradients():
    """Fails if a run on disks, which computes them all, counts fewer."""
    config = load_config(
        HALF_FROZEN["groups"]
        | {"zero.offload": {"kind": "nvme", "nvme_paths": ["/tmp"]}}
    )
    assert flops_per_weight(config) == 6
