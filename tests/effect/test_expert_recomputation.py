"""How often a layer of experts exchanges tokens, by the policy of recomputation."""

import dataclasses

import pytest

from tests.support import tensor
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.settings import schema

MOE = schema.TokenChoice(num_experts=8, drop="position", min_capacity=1)
MODEL = dataclasses.replace(
    tensor.GPT, num_layers=1, embed_size=16, mlp_size=32, vocab_size=64, moe=MOE
)
DROPLESS = dataclasses.replace(MODEL, moe=schema.TokenChoice(num_experts=8))


def exchanges(model, remat, mesh, stage):
    """Collectives over `expert` of as many values as tokens of a device have."""
    config = tensor.make_config(dataclasses.replace(model, remat=remat), mesh, stage)
    step, compiled, _ = tensor.compile_step(config, 8)
    tokens = tensor.ROWS * tensor.LENGTH // 8
    return sum(
        each.times
        for each in list_collectives(compiled.as_text())
        if mesh_axes(each.groups, step.mesh) == ("expert",)
        and each.op in ("all-to-all", "all-gather", "reduce-scatter")
        and each.elements >= tokens * model.embed_size
    )


@pytest.mark.parametrize(
    ("model", "remat", "expected"),
    [
        (MODEL, "full", 5),
        (MODEL, "attention", 4),
        (DROPLESS, "elementwise", 4),
    ],
    ids=["rows-full", "rows-attention", "tokens-elementwise"],
)
def test_recomputation_repeats_no_exchange(model, remat, expected):
    """Only `full` sends tokens again, and not outputs, which no gradient reads."""
    assert exchanges(model, remat, schema.Mesh(data=2, expert=4), 0) == expected


def test_gathering_parameters_again_gathers_no_tokens():
    """Fails if the policy of ZeRO 3 takes tokens for parameters."""
    assert exchanges(DROPLESS, "none", schema.Mesh(data=2, expert=4), 3) == 4


def test_tensor_ranks_recompute_without_exchange():
    mesh = schema.Mesh(data=1, expert=4, tensor=2)
    assert exchanges(DROPLESS, "attention", mesh, 0) == 4
