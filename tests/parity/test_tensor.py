"""Whatever is split over the tensor axis, training is that of one device."""

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

SLOW = pytest.mark.slow
replace = dataclasses.replace
GPT, LLAMA = (replace(model, num_layers=1) for model in (tensor.GPT, tensor.LLAMA))
TURING = replace(GPT, num_heads=28, num_kv_heads=28, embed_size=56)
"""28 heads, as Turing-NLG has."""


def case(model, mesh, stage=0, *, id, marks=(), **settings):
    config = tensor.make_config(model, mesh, stage, **settings)
    return pytest.param(config, id=id, marks=marks)


def mesh(tensor, data=1):
    return schema.Mesh(tensor=tensor, data=data)


QWEN = replace(LLAMA, num_heads=14, num_kv_heads=2, embed_size=56)
"""Groups of seven heads, as Qwen2 7B has."""
CASES = [
    case(
        replace(QWEN, use_bias=True, head_size=6, query_key_norm=True),
        mesh(4, 2),
        1,
        id="groups-do-not-divide",
    ),
    case(
        replace(LLAMA, num_heads=6, num_kv_heads=3, embed_size=24),
        mesh(4),
        2,
        id="kv-heads-do-not-divide",
        marks=SLOW,
    ),
    case(replace(QWEN, num_kv_heads=1), mesh(8), id="one-kv-head-of-14", marks=SLOW),
    case(
        replace(LLAMA, num_kv_heads=2, mlp_size=58),
        mesh(4, 2),
        1,
        num_microbatches=2,
        id="copied-kv-heads-accumulated",
    ),
    case(
        replace(TURING, dropout_rate=0.1, attention_dropout_rate=0.3),
        mesh(8),
        id="28-heads-dropout",
    ),
    case(replace(tensor.GPT, layers_per_scan=1), mesh(2, 2), 3, id="stage-3-loop"),
    case(
        replace(QWEN, use_bias=True),
        mesh(4, 2),
        2,
        id="adapters-of-padded-heads",
        lora=schema.Lora(rank=4, form="dora", also_train=("norm",)),
    ),
    case(
        replace(
            LLAMA,
            num_heads=6,
            num_kv_heads=6,
            positions=schema.Rotary(size=4),
            latent=schema.Latent(key_rank=5, query_rank=7, plain_size=3, value_size=6),
        ),
        mesh(4, 2),
        2,
        id="latents-and-padded-heads",
    ),
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
    case(
        replace(GPT, mlp_chunk_tokens=4, remat="full"),
        mesh(4, 2),
        3,
        id="chunks-of-tokens",
        marks=SLOW,
    ),
    case(
        replace(GPT, attention=schema.Sparse(block=16)),
        mesh(4, 2),
        1,
        length=32,
        id="sparse",
        marks=SLOW,
    ),
    case(TURING, mesh(8), 2, num_microbatches=4, id="28-heads", marks=SLOW),
]


@pytest.mark.parametrize("config", CASES)
def test_losses_and_weights_are_those_of_one_device(config):
    check(config)


@SLOW
@pytest.mark.parametrize("reduce_dtype", ["compute", "float32"])
def test_bfloat16_stays_near_one_device(reduce_dtype):
    """Sums in another order differ by the digits of the dtype, and by no factor."""
    precision = schema.Precision(compute_dtype="bfloat16", reduce_dtype=reduce_dtype)
    config = tensor.make_config(LLAMA, mesh(4, 2), 2, precision=precision)
    alone = replace(config, mesh=schema.Mesh(), zero=schema.Zero(stage=0))
    losses, weights = tensor.train(config, 8)
    expected, expected_weights = tensor.train(alone, 1)
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    for path, x in expected_weights.items():
        moved = np.abs(x - x.mean()).max()
        np.testing.assert_allclose(weights[path], x, atol=2e-2 * moved, err_msg=path)


@SLOW
def test_state_on_the_host(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    zero = {"offload": schema.PinnedHost(), "min_shard_elements": 0}
    model = replace(TURING, remat="full")
    check(tensor.make_config(model, mesh(4, 2), 2, zero=zero))


def check(config):
    alone = replace(config, mesh=schema.Mesh(), zero=schema.Zero(stage=0))
    num_devices = config.mesh.tensor * config.mesh.data
    losses, weights = tensor.train(config, num_devices)
    expected, expected_weights = tensor.train(alone, 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert weights.keys() == expected_weights.keys()
    for path, x in expected_weights.items():
        np.testing.assert_allclose(weights[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


@SLOW
def test_28_heads_on_16_devices():
    """12 devices have two heads and 4 have one, or 14 have two: both take two."""
    words = [sys.executable, "-m", "tests.support.sixteen"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    found, expected = json.loads(out.stdout.splitlines()[-1])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_28_heads_are_planned_for_16_devices():
    config = tensor.make_config(TURING, mesh(16))
    check_config(config, 16)
    model = make_model(config)
    abstract = abstract_mesh(config.mesh, 16)
    plan = plans.make_plan(config, abstract, model, make_optimizer(config, model))
    row = plan.compute["blocks"]["attention"]["query"]["kernel"]
    assert (row.shape[2], row.stored_shape[2]) == (28, 32)
    assert row.device_bytes == 4 * 56 * 2 * 2
