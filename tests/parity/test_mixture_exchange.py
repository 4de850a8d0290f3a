"""Built-in models with experts train alike on every mesh."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.support import tensor
from zjax.settings import schema

EXPERTS = schema.TokenChoice(num_experts=4, top_k=2, balance_loss=0.0)
GPT = dataclasses.replace(tensor.GPT, moe=EXPERTS)
LLAMA = dataclasses.replace(
    tensor.LLAMA,
    moe=dataclasses.replace(EXPERTS, every=2, num_shared=1, expert_size=16),
)
SMALL = {"embed_size": 16, "mlp_size": 32, "num_heads": 4, "num_kv_heads": 4}
MODELS = {
    name: dataclasses.replace(model, vocab_size=64, **SMALL)
    for name, model in {"gpt": GPT, "llama": LLAMA}.items()
}


@functools.cache
def alone(name):
    return tensor.train(tensor.make_config(MODELS[name], schema.Mesh()), 1)


@pytest.mark.parametrize(
    ("name", "mesh", "stage"),
    [
        pytest.param(
            *("gpt", schema.Mesh(data=2, expert=4), 0), marks=pytest.mark.slow
        ),
        pytest.param(
            *("gpt", schema.Mesh(data=4, expert=2), 3), marks=pytest.mark.slow
        ),
        pytest.param(
            *("llama", schema.Mesh(data=2, expert=2, tensor=2), 1),
            marks=pytest.mark.slow,
        ),
        ("gpt", schema.Mesh(data=1, expert=4, tensor=2), 3),
        ("llama", schema.Mesh(data=2, expert=2, sequence=2), 2),
        ("gpt", schema.Mesh(pipeline=2, data=2, expert=2), 1),
    ],
    ids=str,
)
def test_steps_are_those_of_one_device(name, mesh, stage):
    """Fails for tokens that reach the experts of other tokens."""
    losses, params = tensor.train(tensor.make_config(MODELS[name], mesh, stage), 8)
    expected, weights = alone(name)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for path, x in weights.items():
        np.testing.assert_allclose(params[path], x, rtol=2e-4, atol=5e-6)


@pytest.mark.parametrize(
    "moe",
    [
        dataclasses.replace(EXPERTS, top_k=1, drop="position", min_capacity=2),
        schema.ExpertChoice(num_experts=4, min_capacity=1),
    ],
    ids=["drops", "expert-choice"],
)
def test_devices_that_send_rows_train_as_devices_with_all_experts(moe):
    """Tokens have no expert or several; each device routes its own in both runs."""
    model = dataclasses.replace(MODELS["gpt"], num_layers=1, moe=moe)
    meshes = schema.Mesh(data=2, expert=4), schema.Mesh(data=8)
    found, expected = (
        tensor.train(tensor.make_config(model, mesh, 1), 8) for mesh in meshes
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for path, x in expected[1].items():
        np.testing.assert_allclose(found[1][path], x, rtol=2e-4, atol=5e-6)
