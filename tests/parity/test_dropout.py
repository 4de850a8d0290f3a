"""Every mesh and schedule drops what one device drops."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests.support import pipelines
from tests.support.cases import some_by_hand
from tests.support.trees import assert_close
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run

RATE = 0.1
ATTENTION = {"attention_dropout_rate": 0.3}
CASES = {
    "rows on eight devices": {
        "mesh": {"data": 8},
        "num_layers": 2,
        "stage": 3,
        "num_microbatches": 2,
        **ATTENTION,
    },
    "rows twice, tensors and Ulysses": {
        "mesh": {"replica": 2, "tensor": 2, "sequence": 2},
        "num_layers": 2,
        "num_microbatches": 2,
        "sequence_attention": "ulysses",
        **ATTENTION,
    },
    "1f1b": {"mesh": {"pipeline": 2, "data": 2}, "remat": "full", **ATTENTION},
    "interleaved": {
        "mesh": {"pipeline": 2, "data": 4},
        "stage": 3,
        "pipeline": "interleaved",
    },
    "weights apart, tokens in the order of a ring": {
        "mesh": {"pipeline": 2, "data": 2, "sequence": 2},
        "pipeline": "zb_h1",
        "sequence_attention": "ring",
    },
}


BY_HAND = {"1f1b", "interleaved", "weights apart, tokens in the order of a ring"}
"""What other cases hold among more."""


@pytest.mark.parametrize("name", some_by_hand(CASES, BY_HAND))
def test_training_equals_one_device(name):
    """Fails if a token draws by its device, its stage, or the order of the passes."""
    case = {"dropout_rate": RATE} | CASES[name]
    config = pipelines.make_config(**case)
    num_devices = math.prod(case["mesh"].values())
    run = pipelines.start(config, jax.devices()[:num_devices])
    losses, weights = pipelines.train(run)
    number = case.get("num_microbatches", 4)
    of_model = "dropout_rate", "num_layers"
    model = {name: x for name, x in case.items() if name.endswith(of_model)}
    wanted_losses, wanted = pipelines.on_one_device(number, **model)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(weights, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_model_of_yours_draws_in_a_pipeline_what_it_draws_without():
    """Fails if shares of a batch draw the same, or stages by another key."""

    def losses(num_devices, **mesh):
        shape = {"num_layers": 2, "num_microbatches": 2, "dropout_rate": RATE}
        config = pipelines.make_config(mesh=mesh, stage=0, **shape)
        precision = dataclasses.replace(config.precision, reduce_dtype="float32")
        config = dataclasses.replace(config, precision=precision)
        model = dataclasses.replace(make_model(config), separable=False)
        devices = jax.devices()[:num_devices]
        tx = make_optimizer(config, model)
        run = make_run(config, model, tx, devices=devices)
        return pipelines.train(run, 2)[0]

    found, wanted = losses(4, pipeline=2, data=2), losses(2, data=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    as_one = losses(1)
    np.testing.assert_allclose(losses(2, pipeline=2), as_one, rtol=1e-5)
    assert abs(wanted[0] / as_one[0] - 1) > 1e-4
