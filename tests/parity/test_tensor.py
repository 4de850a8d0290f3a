"""Heads that do not divide over many devices."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support import tensor
from zjax.config import check_config
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax.sharding.mesh import abstract_mesh

TURING = dataclasses.replace(
    tensor.GPT, num_layers=1, num_heads=28, num_kv_heads=28, embed_size=56
)
"""28 heads, as Turing-NLG has."""


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", ["compute", "float32"])
def test_bfloat16_stays_near_one_device(reduce_dtype):
    """Sums in another order differ by the digits of the dtype, and by no factor."""
    model = dataclasses.replace(tensor.LLAMA, num_layers=1)
    precision = schema.Precision(compute_dtype="bfloat16", reduce_dtype=reduce_dtype)
    mesh = schema.Mesh(tensor=4, data=2)
    config = tensor.make_config(model, mesh, 2, precision=precision)
    alone = tensor.make_config(model, schema.Mesh(), precision=precision)
    losses, weights = tensor.train(config, 8)
    expected, expected_weights = tensor.train(alone, 1)
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    for path, x in expected_weights.items():
        moved = np.abs(x - x.mean()).max()
        np.testing.assert_allclose(weights[path], x, atol=2e-2 * moved, err_msg=path)


@pytest.mark.slow
def test_28_heads_on_16_devices():
    """12 devices have two heads and 4 have one, or 14 have two: both take two."""
    words = [sys.executable, "-m", "tests.support.sixteen"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    found, expected = json.loads(out.stdout.splitlines()[-1])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_28_heads_are_planned_for_16_devices():
    config = tensor.make_config(TURING, schema.Mesh(tensor=16, data=1))
    check_config(config, 16)
    model = make_model(config)
    abstract = abstract_mesh(config.mesh, 16)
    plan = plans.make_plan(config, abstract, model, make_optimizer(config, model))
    row = plan.compute["blocks"]["attention"]["query"]["kernel"]
    assert (row.shape[2], row.stored_shape[2]) == (28, 32)
    assert row.device_bytes == 4 * 56 * 2 * 2
