"""Experts of few tokens against the router and the experts of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.moe import experts as all_experts
from zjax.moe import router as routers
from zjax.moe.experts import Experts
from zjax.moe.few_rows import chooses_in_kernel, chosen_by, mix_few_rows, router_kernel
from zjax.moe.router import Router, RouterArrays
from zjax_kernels import choose_experts, lay_router

route = jax.jit(routers.route, static_argnums=1)
router_logits = jax.jit(routers.router_logits)
apply_experts = jax.jit(all_experts.apply_experts, static_argnames="activation")
"""A program of each case: its operations alone would be dozens."""
TOKENS, WIDTH, EXPERTS, HIDDEN = 6, 8, 12, 4
ROUTERS = {
    "one": Router(num_experts=EXPERTS, normalise=False),
    "two": Router(num_experts=EXPERTS, top_k=2),
    "eight": Router(num_experts=EXPERTS, top_k=8, normalise=False, scale=0.5),
    "sigmoid": Router(num_experts=EXPERTS, top_k=3, scores="sigmoid", scale=2.5),
    "groups": Router(
        num_experts=EXPERTS,
        top_k=3,
        scores="sigmoid",
        num_groups=4,
        top_groups=2,
    ),
}
MASKS = {
    "all": None,
    "some": jnp.array([True, False, True, True, False, True]),
    "none": jnp.zeros(TOKENS, bool),
}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make_router(settings, dtype, *, ties=False):
    """Parameters of the router, and the form for few rows."""
    kernel = draw(WIDTH, EXPERTS, seed=1)
    if ties:
        kernel = kernel.at[:, 3:9].set(kernel[:, :1])
    bias = draw(EXPERTS, seed=2) if settings.scores == "sigmoid" else None
    bias = jnp.zeros(EXPERTS) if ties and bias is not None else bias
    given = RouterArrays(kernel, bias, None if ties else draw(EXPERTS, seed=3))
    if chooses_in_kernel(settings):
        return given, given._replace(kernel=lay_router(kernel, dtype))
    return given, given


def weights_of(routing):
    """The weight of each expert in each token."""
    weights = np.zeros((TOKENS, EXPERTS), np.float32)
    rows = np.arange(TOKENS)[:, None]
    weights[rows, np.asarray(routing.experts)] = routing.weights
    return weights


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ["one", "two", "eight", "sigmoid"])
def test_choices_are_those_of_training(name, ties, dtype):
    """Fails if another of equal experts is chosen, or weights are scaled otherwise."""
    settings, x = ROUTERS[name], draw(TOKENS, WIDTH, dtype=dtype)
    given, laid = make_router(settings, dtype, ties=ties)
    logits = router_logits(x, given.kernel, bias=given.logit_bias)
    expected = weights_of(
        route(logits, settings, bias=given.bias, counts=MASKS["some"])
    )
    choice = choose_experts(
        x,
        laid.kernel,
        num_experts=EXPERTS,
        top_k=settings.top_k,
        scores=settings.scores,
        normalise=settings.normalise,
        scale=settings.scale,
        bias=laid.bias,
        logit_bias=laid.logit_bias,
        counts=MASKS["some"],
    )
    found = np.asarray(choice.gates[:EXPERTS, :TOKENS].T)
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    used = np.flatnonzero(expected.any(0))
    np.testing.assert_array_equal(choice.ids[: choice.count[0]], used)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ROUTERS)
def test_outputs_are_those_of_training(name, mask, activation):
    """With biases for GELU."""
    settings, x = ROUTERS[name], draw(TOKENS, WIDTH)
    given, laid = make_router(settings, x.dtype)
    parts = 2 if activation == "swiglu" else 1
    experts = Experts(
        draw(EXPERTS, WIDTH, HIDDEN * parts, seed=4),
        draw(EXPERTS, HIDDEN, WIDTH, seed=5),
    )
    if activation == "gelu":
        biases = draw(EXPERTS, HIDDEN, seed=6), draw(EXPERTS, WIDTH, seed=7)
        experts = Experts(experts.up, experts.down, *biases)
    logits = router_logits(x, given.kernel, bias=given.logit_bias)
    routing = route(logits, settings, bias=given.bias, counts=MASKS[mask])
    expected = apply_experts(x, experts, routing, activation=activation)

    @jax.jit
    def mix(x):
        found, choice = mix_few_rows(
            x,
            laid,
            experts,
            settings,
            activation=activation,
            token_mask=MASKS[mask],
            residual=x,
        )
        return found, chosen_by(choice, settings, len(x))

    found, chosen = mix(x)
    np.testing.assert_allclose(found - x, expected, rtol=1e-4, atol=1e-4)
    # The router ranks by the bias, too, which is no part of a weight.
    counts = slice(None) if MASKS[mask] is None else MASKS[mask]
    pair = (np.sort(each, axis=1)[counts] for each in (chosen, routing.experts))
    np.testing.assert_array_equal(*pair)


def test_padding_reads_no_expert():
    """Fails if a token that does not count touches the experts that it would choose."""
    settings, x = ROUTERS["two"], draw(TOKENS, WIDTH)
    given, laid = make_router(settings, x.dtype)
    logits = router_logits(x, given.kernel, bias=given.logit_bias)
    chosen = route(logits, settings).experts[MASKS["some"]]
    # Every other expert would show: it is NaN.
    is_chosen = jnp.zeros(EXPERTS, bool).at[chosen.ravel()].set(True)
    assert not is_chosen.all()
    up, down = draw(EXPERTS, WIDTH, 2 * HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    hidden = [jnp.where(is_chosen[:, None, None], y, jnp.nan) for y in (up, down)]
    found, _ = mix_few_rows(
        x,
        laid,
        Experts(*hidden),
        settings,
        activation="swiglu",
        token_mask=MASKS["some"],
    )
    assert jnp.isfinite(found).all() and (found[1] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_laid_matrix_is_read_back(dtype):
    kernel = draw(WIDTH, EXPERTS, dtype=dtype)
    for rows in (jnp.bfloat16, jnp.float32):
        found = router_kernel(lay_router(kernel, rows), WIDTH, EXPERTS)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.float32(found), np.float32(kernel))


def test_groups_are_left_to_the_router_of_training():
    assert not chooses_in_kernel(ROUTERS["groups"])
    assert chooses_in_kernel(dataclasses.replace(ROUTERS["groups"], top_groups=4))
