"""Stages multiply fewer tokens, and nothing for layers that they skip."""

import functools
import math

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.jaxprs.program import programs_in
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.typing import Dropping, StepBatch

SETTINGS = (
    "model.num_layers=6",
    "model.embed_size=64",
    "model.mlp_size=256",
    "model.remat=none",
    "mesh.pipeline=2",
    "mesh.data=1",
    "num_microbatches=2",
)


def flops(program, *, also_skipped=True):
    """Of all matrix products; those under a condition with a branch that has none are
    skipped at times."""
    total = 0
    for each in program.eqns:
        inside = [
            flops(x, also_skipped=also_skipped)
            for x in map(lambda x: getattr(x, "jaxpr", x), programs_in(each))
        ]
        is_optional = each.primitive.name == "cond" and min(inside) == 0
        total += 0 if is_optional and not also_skipped else sum(inside)
        if each.primitive.name == "dot_general":
            ((dims, _), _), (left, _) = each.params["dimension_numbers"], each.invars
            contracted = math.prod(left.aval.shape[i] for i in dims)
            total += 2 * contracted * math.prod(each.outvars[0].aval.shape)
    return total


@pytest.fixture(scope="module")
def program():
    """From what a step drops to its program, which is not compiled."""
    config = small_run.make_config("runs/none", *SETTINGS)
    model = make_model(config)
    tx = make_optimizer(config, model)
    run = make_run(config, model, tx, devices=jax.devices()[:2])
    tokens = np.zeros((16, 16), np.int32)
    batch = {"tokens": tokens, "targets": tokens}

    @functools.cache
    def trace(dropping):
        inputs = run.state, StepBatch(batch, dropping)
        with jax.set_mesh(run.mesh):
            return jax.make_jaxpr(run.step.executor.programs["train"])(*inputs).jaxpr

    return trace


def test_products_fall_with_the_tokens(program):
    """Fails if tokens are computed and thrown away: one of three slots is cut."""
    whole, quarter = (flops(program(x)) for x in (Dropping(), Dropping(num_kept=4)))
    assert (whole - quarter) / whole == pytest.approx(0.75 / 3, rel=0.2)


def test_layers_are_skipped_and_not_computed_for_nothing(program):
    """Fails if a stage computes a layer that it drops. What remains is the head."""
    plain, dropping = map(program, (Dropping(), Dropping(theta=np.float32(0.5))))
    always = flops(dropping, also_skipped=False)
    assert always < 0.1 * flops(plain, also_skipped=False)
    assert flops(dropping) == pytest.approx(flops(plain), rel=0.05)
