"""Experts against a loop over tokens, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.experts import outcomes
from tests.support.lowering import num_kernels
from zjax.errors import PlanError
from zjax.moe.experts import Experts, apply_experts
from zjax.moe.router import Router, route
from zjax_kernels import device

E, M, F, T = 5, 6, 4, 24


def clamped(gate, value):
    gate, value = jnp.minimum(gate, 7.0), jnp.clip(value, -7.0, 7.0)
    return (value + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS = {
    "swiglu": lambda h: jax.nn.silu(h[..., :F]) * h[..., F:],
    "clamped_swiglu": lambda h: clamped(h[..., :F], h[..., F:]),
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def make_experts(activation, with_bias, dtype=jnp.float32):
    width = F * (1 + activation.endswith("swiglu"))
    shapes = [(E, M, width), (E, F, M)] + [(E, width), (E, M)] * with_bias
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return Experts(*(jax.random.normal(key, shape, dtype) for key, shape in pairs))


def by_token(x, experts, routing, activation):
    """Each token through each of its experts, with nothing sorted."""
    own = jax.tree.map(lambda leaf: leaf[routing.experts], experts)
    hidden = jnp.einsum("tm,tkmf->tkf", x, own.up)
    if own.up_bias is not None:
        hidden += own.up_bias
    outputs = jnp.einsum("tkf,tkfm->tkm", ACTIVATIONS[activation](hidden), own.down)
    if own.down_bias is not None:
        outputs += own.down_bias
    return jnp.einsum("tk,tkm->tm", routing.weights, outputs)


@pytest.mark.parametrize(
    ("activation", "top_k", "drop", "with_bias"),
    [
        ("swiglu", 1, "position", True),
        ("swiglu", 3, "none", False),
        ("clamped_swiglu", 2, "none", True),
        ("gelu", 1, "position", True),
        ("relu", 3, "none", False),
    ],
)
def test_outputs_and_gradients_are_those_of_single_tokens(
    activation, top_k, drop, with_bias
):
    """Fails if a weight is not applied, or a row returns to another token."""
    router = Router(num_experts=E, top_k=top_k, drop=drop, min_capacity=1)
    x, cotangent = jax.random.normal(jax.random.key(1), (2, T, M))
    # The fifth expert has no token.
    logits = jax.random.normal(jax.random.key(2), (T, E)).at[:, 4].set(-1e9)
    experts = make_experts(activation, with_bias)

    found, expected = outcomes(
        by_token, x, cotangent, experts, logits, router, activation=activation
    )
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)
    gradients = found[1][1]
    assert all((leaf[4] == 0).all() for leaf in jax.tree.leaves(gradients))


def test_a_dropped_token_gives_0():
    router = Router(num_experts=E, drop="position", min_capacity=1, capacity_factor=0.0)
    routing = route(jnp.zeros((T, E)), router, key=jax.random.key(0))
    x = jnp.ones((T, M))
    out = apply_experts(x, make_experts("relu", True), routing, activation="relu")
    assert (out[1:] == 0).all()
    assert (out[0] != 0).any()


def test_the_backward_pass_reads_pre_activations_alone():
    """Fails if outputs of experts, or activations, are kept for it."""
    routing = route(
        jax.random.normal(jax.random.key(2), (T, E)), Router(num_experts=E, top_k=2)
    )
    x, experts = jnp.ones((T, M)), make_experts("swiglu", False)
    _, pull = jax.vjp(lambda x, w: apply_experts(x, w, routing), x, experts)
    saved = [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.float32]
    parameters = {leaf.shape for leaf in jax.tree.leaves(experts)}
    shapes = sorted(x.shape for x in saved if x.shape not in parameters)
    assert shapes == [(T, 2), (T, M), (2 * T, 2 * F)]


def test_bfloat16_sums_in_float32():
    router = Router(num_experts=E, top_k=4)
    routing = route(jax.random.normal(jax.random.key(2), (T, E)), router)
    x = jax.random.normal(jax.random.key(1), (T, M), jnp.bfloat16)
    experts = make_experts("swiglu", False, jnp.bfloat16)
    found = apply_experts(x, experts, routing)
    assert found.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, experts))
    expected = apply_experts(*wide, routing)
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.15)


def test_experts_of_another_number_are_refused():
    """Fails if a choice of an expert that no device has is taken for a dropped one."""
    routing = route(jnp.zeros((T, 2 * E)), Router(num_experts=2 * E))
    with pytest.raises(PlanError) as error:
        apply_experts(jnp.ones((T, M)), make_experts("relu", True), routing)
    assert str(error.value) == (
        "experts.up.shape[0]=5 is not the number of experts of one of 1 devices, which "
        "have 10 in all; name the first dim of the parameters `experts`, or change the "
        "router"
    )


def test_a_routing_of_other_tokens_is_refused():
    routing = route(jnp.zeros((T, E)), Router(num_experts=E))
    with pytest.raises(PlanError) as error:
        apply_experts(jnp.ones((T - 1, M)), make_experts("relu", True), routing)
    assert str(error.value) == (
        f"x.shape[0]={T - 1} is not the number of tokens of the routing, {T}; route "
        "the same tokens"
    )


def test_both_passes_run_fused_kernels(monkeypatch):
    """Three copies of tokens to rows, and six products that do all the rest."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    shapes = (E, 128, 256), (E, 128, 128)
    experts = Experts(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    x = jax.ShapeDtypeStruct((T, 128), jnp.bfloat16)

    def loss(x, experts):
        routing = route(x[:, :E].astype(jnp.float32), Router(num_experts=E, top_k=2))
        return apply_experts(x, experts, routing).astype(jnp.float32).sum()

    gradients = jax.value_and_grad(loss, argnums=(0, 1))
    assert num_kernels(gradients, x, experts) == 9
