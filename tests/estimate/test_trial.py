"""Bytes of a step on a mesh: parts by hand, wholes as they were measured."""

import re

import jax
import pytest

from tests.support.proposals import config_of
from zjax.estimate.tables import describe_stages
from zjax.estimate.trial import weigh
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan


def weighed(shape, changes, **mesh):
    config = config_of(shape, changes, {"global_batch_size": 0})
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    number = sum(x.size for x in jax.tree.leaves(params))
    trial = weigh(config, schema.Mesh(**mesh), model, make_optimizer(config, model))
    return trial, number


@pytest.mark.parametrize(
    ("stage", "measured_gb"), [(2, 60.06), (3, 52.21)], ids=["zero-2", "zero-3"]
)
def test_bytes_are_those_that_were_measured(stage, measured_gb):
    """Peaks of GPT 6.7B on four H200s, from BENCHMARKS.md; we foretell a tenth more."""
    changes = {"zero.stage": stage, "model.remat": "elementwise"}
    trial, _ = weighed("gpt 6.7b", changes, data=4)
    assert 1 <= trial.total / 1e9 / measured_gb < 1.11


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "mesh", "per_param"),
    [
        (0, 1, {"data": 4}, 12 + 4 + 2),
        (1, 1, {"data": 4}, (12 + 4) / 4 + 2),
        (1, 8, {"data": 4}, 12 / 4 + 4 + 2 + 2),
        (2, 8, {"data": 4}, (12 + 4) / 4 + 2),
        (1, 8, {"data": 2, "tensor": 2}, (12 / 2 + 4 + 2 + 2) / 2),
        (1, 8, {"pipeline": 2, "data": 2}, (12 / 2 + 2 * 4 + 3 * 2) / 2),
    ],
)
def test_state_per_parameter(stage, num_microbatches, mesh, per_param):
    """Fails if sums of gradients, gradients beside them, or what stages lay out anew
    are left out; 12 of Adam and 4 of a sum in float32, 2 of a number in bfloat16."""
    changes = {"zero.stage": stage, "num_microbatches": num_microbatches}
    trial, number = weighed("gpt 6.7b", changes, **mesh)
    assert trial.state / number == pytest.approx(per_param, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "mesh", "per_frozen", "per_learned"),
    [
        (1, {"data": 4}, 2, 12 / 4 + 4 + 2 + 2),
        (2, {"data": 4}, 2, (12 + 4) / 4 + 2),
        (1, {"pipeline": 2, "data": 2}, 4 / 2, (12 / 2 + 2 * 4 + 3 * 2) / 2),
    ],
)
def test_frozen_parameters_count_once_in_the_compute_dtype(
    stage, mesh, per_frozen, per_learned
):
    """Fails if a frozen weight counts as one with a master, moments or a gradient."""
    changes = {"zero.stage": stage, "num_microbatches": 8, "lora.rank": 8}
    trial, number = weighed("gpt 6.7b", changes, **mesh)
    layers, width = 32, 4096
    learned = layers * 8 * (4 * 2 * width + 2 * 5 * width)
    expected = per_frozen * (number - learned) + per_learned * learned
    assert trial.state == pytest.approx(expected, rel=0.01)


def test_closed_form_counts_frozen_parameters_once():
    """Fails if the form beside the table adds masters that frozen weights lack."""
    config = config_of("gpt 6.7b", {"zero.stage": 0, "lora.rank": 8}, {})
    model, mesh = make_model(config), abstract_mesh(schema.Mesh(data=4), 4)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    (row,) = (x for x in describe_stages([plan], [()]).splitlines() if " GB" in x)
    *_, total, form = re.findall(r"[\d.]+ GB", row)
    assert total == form
