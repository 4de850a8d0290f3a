"""Whatever is split over the tensor axis, training is that of one device."""

import dataclasses

import numpy as np
import pytest

from tests.support import tensor
from zjax.config import schema

SLOW = pytest.mark.slow
GPT, LLAMA = tensor.GPT, tensor.LLAMA
TURING = dataclasses.replace(GPT, num_heads=28, num_kv_heads=28, embed_size=56)
"""28 heads, as Turing-NLG has."""


def case(model, mesh, stage=0, *, id, marks=(), **settings):
    config = tensor.make_config(model, mesh, stage, **settings)
    return pytest.param(config, id=id, marks=marks)


def mesh(tensor, data=1):
    return schema.Mesh(tensor=tensor, data=data)


replace = dataclasses.replace
CASES = [
    case(
        replace(LLAMA, num_kv_heads=2, mlp_size=58),
        mesh(4, 2),
        1,
        num_microbatches=2,
        id="copied-kv-heads-accumulated",
    ),
    case(replace(TURING, dropout_rate=0.1), mesh(8), id="28-heads-dropout"),
    case(replace(GPT, layers_per_scan=1), mesh(2, 2), 3, id="stage-3-loop"),
    case(GPT, mesh(2), id="two", marks=SLOW),
    case(replace(LLAMA, num_kv_heads=1), mesh(2, 4), 2, id="one-kv-head", marks=SLOW),
    case(
        replace(LLAMA, num_heads=12, num_kv_heads=6, embed_size=48),
        mesh(2, 2),
        1,
        id="kv-heads-divide",
        marks=SLOW,
    ),
    case(GPT, mesh(4, 2), 2, length=15, id="length-does-not-divide", marks=SLOW),
    case(replace(GPT, remat="elementwise"), mesh(4, 2), 1, id="remat", marks=SLOW),
    case(replace(GPT, remat="full"), mesh(4, 2), 3, id="remat-full", marks=SLOW),
    case(replace(GPT, kind="encoder"), mesh(4, 2), 1, id="encoder", marks=SLOW),
    case(replace(GPT, mlp_tiles=2), mesh(4, 2), 3, id="tiles", marks=SLOW),
    case(
        replace(GPT, loss_chunk_tokens=32, z_loss=1e-3),
        mesh(4, 2),
        1,
        id="chunks-of-logits",
        marks=SLOW,
    ),
    case(TURING, mesh(8), 2, num_microbatches=4, id="28-heads", marks=SLOW),
]


@pytest.mark.parametrize("config", CASES)
def test_losses_and_weights_are_those_of_one_device(config):
    alone = replace(config, mesh=schema.Mesh(), zero=schema.Zero(stage=0))
    num_devices = config.mesh.tensor * config.mesh.data
    losses, weights = tensor.train(config, num_devices)
    expected, expected_weights = tensor.train(alone, 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert weights.keys() == expected_weights.keys()
    for path, x in expected_weights.items():
        np.testing.assert_allclose(weights[path], x, rtol=1e-5, atol=1e-6, err_msg=path)
