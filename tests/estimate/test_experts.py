"""What the plan says of an exchange is what the program does."""

import collections
import dataclasses
import re

import pytest

from tests.support import tensor
from zjax.estimate.activations import (
    activation_bytes,
    describe_exchanges,
    layer_exchanges,
)
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.run.plan_report import report_plan
from zjax.settings import schema
from zjax.settings.axes import axis_sizes
from zjax.settings.batch import resolve_batch

MESH = schema.Mesh(data=2, expert=4)
DROPPING = schema.TokenChoice(num_experts=8, top_k=2, drop="position", min_capacity=1)


def make_config(moe, mesh=MESH, **model):
    small = {"num_layers": 1, "embed_size": 16, "mlp_size": 32, "vocab_size": 64}
    shape = dataclasses.replace(tensor.GPT, moe=moe, **(small | model))
    return tensor.make_config(shape, mesh)


def sizes_of(config):
    sizes = axis_sizes(config, 8)
    shares = sizes["replica"] * sizes["data"] * sizes["expert"]
    return sizes, resolve_batch(config, shares)


def test_the_plan_tells_each_exchange_and_why(tmp_path):
    """Small capacities are raised to 4, which fills more than the all-gather."""
    moe = dataclasses.replace(DROPPING, num_experts=(4, 16), min_capacity=4)
    config = make_config(moe, num_layers=2)
    text = (
        "experts over expert=4: each of the 4 exchanges of a layer and microbatch\n"
        "experts   exchange     bytes/device   because\n"
        "X\n"
        "      4   all-to-all        1.54 kB   experts of a device take 8 rows of 16 "
        "tokens\n"
        "     16   all-gather        3.07 kB   experts of a device take 16 rows of 16 "
        "tokens"
    )
    found = describe_exchanges(config, *sizes_of(config))
    assert re.sub("─+", "X", found) == text
    picture = str(tmp_path / "plan.png")
    assert found in report_plan(config, num_devices=8, picture=picture)


@pytest.mark.parametrize(
    ("moe", "ops"),
    [
        (DROPPING, {"all-to-all"}),
        (schema.TokenChoice(num_experts=8, top_k=2), {"all-gather", "reduce-scatter"}),
    ],
    ids=["all-to-all", "all-gather"],
)
def test_the_program_sends_what_the_plan_says(moe, ops):
    config = make_config(moe)
    (choice,) = layer_exchanges(config, *sizes_of(config)).values()
    step, compiled, _ = tensor.compile_step(config, 8)
    sent = collections.Counter()
    for each in list_collectives(compiled.as_text()):
        if mesh_axes(each.groups, step.mesh) == ("expert",):
            sent[each.elements] += each.op in ops
    assert sent[4 * choice.sent * config.model.embed_size] == 4


def test_memory_grows_with_the_rows_that_may_arrive():
    """Fails if the plan counts the rows of an even load alone."""
    moe = schema.TokenChoice(num_experts=8, top_k=2)
    alone, split = (
        make_config(moe, mesh, remat="none") for mesh in (schema.Mesh(), MESH)
    )
    less, more = (activation_bytes(each, *sizes_of(each)) for each in (alone, split))
    # Up to 8 rows per token instead of 2, of which 2.5 are saved: inputs and outputs of
    # the activation; tokens that arrive; and, as they are computed, the rows.
    hidden, width = 2 * alone.model.mlp_size, alone.model.embed_size
    values = (2.5 - 2) * hidden + 2 * (8 - 2) * hidden
    values += 3 * 4 * width + 2 * 2 * (8 - 2) * width
    assert more - less == 4 * tensor.LENGTH * values
