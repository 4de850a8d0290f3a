"""Parameters of published mixtures, from the shapes of the built-in model."""

import math

import jax
import pytest

from zjax.config import load_config
from zjax.models import flops
from zjax.models.build import make_model
from zjax.settings import schema


def gpt(width, num_layers, num_experts, *, residual):
    moe = schema.TokenChoice(num_experts=num_experts, every=2, residual=residual)
    return schema.Model(
        num_layers=num_layers,
        embed_size=width,
        num_heads=16,
        vocab_size=50_257,
        max_length=2_048,
        moe=moe,
    )


def pyramid(*runs):
    return sum(((number,) * layers for layers, number in runs), ())


SMALL, STUDENT = pyramid((10, 32), (2, 64)), pyramid((8, 32), (2, 64))
LARGE, LARGE_STUDENT = pyramid((10, 64), (2, 128)), pyramid((8, 64), (2, 128))
DEEPSPEED = {
    "350M+MoE-128": (gpt(1024, 24, 128, residual=False), "13.15"),
    "1.3B+MoE-128": (gpt(2048, 24, 128, residual=False), "52.47"),
    "350M PR-MoE": (gpt(1024, 24, SMALL, residual=True), "4.117"),
    "1.3B PR-MoE": (gpt(2048, 24, LARGE, residual=True), "31.39"),
    "350M PR-MoE, MoS": (gpt(1024, 21, STUDENT, residual=True), "3.542"),
    "1.3B PR-MoE, MoS": (gpt(2048, 21, LARGE_STUDENT, residual=True), "26.94"),
}


def count(model):
    built = make_model(schema.Config(model=model))
    shapes, _ = jax.eval_shape(built.init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def by_formula(model):
    """A GPT with experts in even layers, counted by hand."""
    h, layers, residual = model.embed_size, model.num_layers, model.moe.residual
    experts = range(2, layers + 1, 2)
    given = model.moe.num_experts
    numbers = given if isinstance(given, tuple) else (given,) * len(experts)
    total = (model.vocab_size + model.max_length + 2) * h + layers * (4 * h**2 + 8 * h)
    total += (layers - len(experts)) * (8 * h**2 + 5 * h)
    for number in numbers:
        total += number * (8 * h**2 + 5 * h) + h * number
        total += residual * (8 * h**2 + 7 * h + 2)
    return total


@pytest.mark.parametrize(("model", "billions"), DEEPSPEED.values(), ids=DEEPSPEED)
def test_deepspeed_moe(model, billions):
    number = count(model)
    assert number == by_formula(model) == flops.num_params(model)
    decimals = len(billions.partition(".")[2])
    assert f"{number / 1e9:.{decimals}f}" == billions


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral_8x7b", "46.70", "12.88"), ("qwen3_moe_30b", "30.53", "3.35")],
)
def test_configs(name, total, active):
    model = load_config(f"configs/{name}.py").model
    number = count(model)
    assert number == flops.num_params(model)
    found = number / 1e9, flops.num_params(model, active=True) / 1e9
    assert tuple(f"{x:.2f}" for x in found) == (total, active)


def test_shared_experts_and_their_gate_count():
    moe = schema.TokenChoice(
        num_experts=4, first_dense=1, num_shared=2, shared_gate=True, expert_size=24
    )
    model = schema.Model(
        num_layers=3, embed_size=16, num_heads=2, vocab_size=61, moe=moe
    )
    assert count(model) == flops.num_params(model)


def test_flops_count_the_experts_of_a_token_alone():
    """Fails if MFU grows with the number of experts."""

    def per_token(num_experts, top_k):
        moe = schema.TokenChoice(num_experts=num_experts, top_k=top_k)
        model = schema.Model(moe=moe)
        return flops.flops_per_token(model, 1024, causal_attention="half")

    dense = flops.flops_per_token(schema.Model(), 1024, causal_attention="half")
    routers = 6 * 12 * 768
    # The losses of the router multiply a few numbers per token.
    assert per_token(8, 1) == pytest.approx(dense + 8 * routers, rel=1e-6)
    assert per_token(64, 1) == pytest.approx(dense + 64 * routers, rel=1e-5)
    mlp = 12 * 2 * 768 * 3072
    assert per_token(8, 2) == pytest.approx(per_token(8, 1) + 6 * mlp, rel=1e-6)
