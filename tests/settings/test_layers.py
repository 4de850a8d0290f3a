"""Where layers run in a loop although nobody asked for one."""

import dataclasses

import jax
import pytest

from tests.support import language
from zjax.models.build import make_model
from zjax.settings.layers import layers_per_scan
from zjax.settings.schema import Config, Data, Precision, Zero

HALF = Precision(compute_dtype="bfloat16")


def make_config(**settings):
    return Config(model=language.GPT, data=Data(length=8), **settings)


def test_deterministic_models_hold_one_kernel_of_each_kind():
    config = make_config(precision=HALF, deterministic=True)
    model = make_model(config)
    assert not model.takes_layers_apart
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = {
        name: jax.ShapeDtypeStruct((2, 8), "int32") for name in ("tokens", "targets")
    }
    program = jax.make_jaxpr(model.loss)(params, state, batch, None)
    lengths = [
        each.params["length"] for each in program.eqns if each.primitive.name == "scan"
    ]
    assert config.model.num_layers in lengths


def test_loops_within_layers_ask_for_a_loop_over_them():
    """Else each layer keeps a copy of its matrices for its own loop."""
    model = dataclasses.replace(language.GPT, remat="full", mlp_chunk_tokens=4)
    config = dataclasses.replace(make_config(), model=model)
    assert layers_per_scan(config) == 1
    stride = dataclasses.replace(model, layers_per_scan=2)
    assert layers_per_scan(dataclasses.replace(config, model=stride)) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"deterministic": True, "precision": Precision(compute_dtype="float32")},
        {"deterministic": True, "zero": Zero(optimizer_memory="pinned_host")},
    ],
    ids=["not-deterministic", "float32", "blocks-apart"],
)
def test_others_keep_their_layers_side_by_side(settings):
    assert layers_per_scan(make_config(**settings)) == 0
