"""Tokens go to the experts that the papers say, by float32 matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import zjax
from tests.reference import moe as reference
from zjax.errors import ConfigError
from zjax.moe import router as routers
from zjax.moe.balance import balance_loss, move_bias, z_loss
from zjax.moe.dispatch import keep_within_capacity
from zjax.moe.router import Router, router_logits
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan

route = jax.jit(routers.route, static_argnums=1)
"""A program of each case: its operations alone would be dozens."""
# Six tokens and three experts, computed by hand from the definitions.
GOLDEN = jnp.array(
    [[2, 1, 0], [2, 0, 1], [1, 0, 0], [0, 3, 1], [3, 0, 0], [0, 1, 2]], jnp.float32
)


def golden(top_k, drop, factor):
    router = Router(
        num_experts=3, top_k=top_k, drop=drop, capacity_factor=factor, min_capacity=0
    )
    return route(GOLDEN, router, key=jax.random.key(0))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=6e-7)


def test_top_1_keeps_the_earlier_tokens():
    found = golden(1, "position", 1.0)
    assert found.experts[:, 0].tolist() == [0, 0, 0, 1, 0, 2]
    assert found.num_chosen.tolist() == [4, 1, 1]
    assert found.num_kept.tolist() == [2, 1, 1]
    close(found.weights[:, 0], [0.665241, 0.665241, 0, 0.843795, 0, 0.665241])
    close(balance_loss(found), 1.237021)
    assert float(z_loss(found)) == pytest.approx(6.570525, abs=1e-5)


def test_tokens_of_the_highest_priority_stay():
    priority = jnp.array([[0.3], [0.9], [0.5], [0.1], [0.7], [0.2]])
    experts, chosen = golden(1, "none", 1.0).experts, jnp.ones((6, 1), bool)
    kept = keep_within_capacity(experts, priority, chosen, 2, "probability", None)
    assert kept[:, 0].tolist() == [False, True, False, True, True, True]


def test_second_choices_queue_behind_all_first_ones():
    found = golden(2, "first_choices", 0.5)
    assert found.experts[:, 1].tolist() == [1, 2, 1, 2, 1, 1]
    assert found.kept[:, 0].tolist() == [True, True, False, True, False, True]
    assert found.kept[:, 1].tolist() == [True, True, False, False, False, False]
    close(found.weights[:, 0], [0.731059, 0.731059, 0, 1, 0, 1])
    close(found.weights[:, 1], [0.268941, 0.268941, 0, 0, 0, 0])
    close(balance_loss(found, choices=1), 1.237021)


def test_top_k_keeps_the_most_probable():
    found = golden(2, "probability", 0.5)
    kept = [
        [e for e, is_kept in zip(experts, own, strict=True) if is_kept]
        for experts, own in zip(
            found.experts.tolist(), found.kept.tolist(), strict=True
        )
    ]
    assert kept == [[0, 1], [2], [], [1], [0], [2]]
    close(found.weights.sum(1), [1, 1, 0, 1, 1, 1])
    close(found.weights[0], [0.731059, 0.268941])
    close(balance_loss(found), 1.012879)


@pytest.mark.parametrize("drop", ["none", "position", "first_choices", "probability"])
@pytest.mark.parametrize(("top_k", "sigmoid"), [(1, False), (2, True), (5, False)])
def test_routing_is_that_of_loops(drop, top_k, sigmoid):
    logits = np.random.default_rng(top_k).normal(size=(64, 8)).astype(np.float32)
    bias = np.random.default_rng(0).normal(size=8) / 8
    router = Router(
        num_experts=8,
        top_k=top_k,
        scores="sigmoid" if sigmoid else "softmax",
        drop=drop,
        min_capacity=0,
        eval_capacity_factor=0.75,
    )
    found = route(jnp.asarray(logits), router, bias=jnp.asarray(bias, jnp.float32))
    experts, weights, kept = reference.route(
        logits.astype(float), top_k, drop, 0.75, sigmoid, bias
    )
    assert found.experts.tolist() == experts.tolist()
    assert found.kept.tolist() == kept.tolist()
    np.testing.assert_allclose(found.weights, weights, rtol=2e-6, atol=1e-7)
    if not sigmoid:
        expected = reference.balance_loss(logits.astype(float), experts)
        assert float(balance_loss(found)) == pytest.approx(expected, rel=1e-5)


def test_the_loss_counts_tokens_that_were_dropped():
    """Fails if an overloaded expert looks even because it drops tokens."""
    assert balance_loss(golden(1, "position", 1.0)) == balance_loss(
        golden(1, "none", 1.0)
    )


@pytest.mark.parametrize("given", [{"drop": "position"}, {"choice": "experts"}])
def test_a_capacity_of_0_is_refused(given):
    router = Router(num_experts=3, eval_capacity_factor=0.0, min_capacity=0, **given)
    with pytest.raises(ConfigError) as error:
        route(GOLDEN, router)
    assert str(error.value) == (
        "eval_capacity_factor=0.0 with min_capacity=0 is a capacity of 0; use more "
        "than 0"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_experts": 4},
            "num_experts=4 is not the number of logits of a token, 3; use 3",
        ),
        (
            {"num_experts": 3, "top_k": 4},
            "top_k=4 is not a number of the 3 experts to choose from; use 1 to 3",
        ),
        (
            {"num_experts": 3, "num_groups": 2},
            "num_groups=2 does not divide 3 experts; use 1",
        ),
    ],
)
def test_a_router_that_does_not_fit_the_logits_is_named(given, message):
    """Fails if tokens of 3 logits get the capacity of 4 experts."""
    with pytest.raises(ConfigError) as error:
        route(GOLDEN, Router(**given))
    assert str(error.value) == message


def test_padding_has_no_expert_and_takes_no_room():
    counts = jnp.array([False, False, True, True, True, True])
    router = Router(num_experts=3, drop="position", min_capacity=2)
    found = route(GOLDEN, router, counts=counts)
    assert found.kept[:, 0].tolist() == [False, False, True, True, True, True]
    assert found.num_chosen.tolist() == [2, 1, 1]
    alone = route(GOLDEN[2:], router)
    close(balance_loss(found), balance_loss(alone))
    close(z_loss(found), z_loss(alone))
    nothing = route(GOLDEN, router, counts=jnp.zeros(6, bool))
    assert float(balance_loss(nothing)) == 0


def test_random_selection_favours_no_position():
    """Fails if the first tokens are kept more often (chi-square over 64 positions)."""
    router = Router(num_experts=1, drop="random", capacity_factor=1 / 8, min_capacity=1)
    keys = jax.random.split(jax.random.key(3), 2000)
    kept = jax.vmap(lambda key: route(jnp.zeros((64, 1)), router, key=key).kept)(keys)
    counts = np.asarray(kept)[..., 0].sum(0)
    expected = 2000 / 8
    assert counts.sum() == 2000 * 8
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * (2 * 63) ** 0.5


def test_a_token_chooses_from_its_best_groups():
    logits = jnp.array([[9.0, -9, 5, 5, 4, 4, 0, 0]])
    router = Router(
        num_experts=8, top_k=3, scores="sigmoid", num_groups=4, top_groups=2, scale=2.5
    )
    found = route(logits, router)
    assert sorted(found.experts[0].tolist()) == [2, 3, 4]
    close(found.weights.sum(), 2.5)


def test_noise_is_for_training_alone():
    router = Router(num_experts=3, top_k=2, sampling="second")
    keys = jax.random.split(jax.random.key(0), 50)
    found = jax.vmap(lambda key: route(GOLDEN, router, key=key).experts)(keys)
    assert (found[..., 0] == GOLDEN.argmax(1)[None]).all()
    assert len({str(x) for x in found[..., 1]}) > 10
    assert (found[..., 0] != found[..., 1]).all()
    still = route(GOLDEN, router).experts
    assert (still == jnp.argsort(-GOLDEN, axis=1)[:, :2]).all()


def test_gradients_go_through_the_weights():
    router = Router(num_experts=4, top_k=2)
    logits = jax.random.normal(jax.random.key(1), (6, 4))

    def weighted(logits):
        weights = route(jnp.asarray(logits), router).weights
        return (weights * jnp.array([[1.0, 3.0]])).sum()

    check_grads(weighted, (logits,), 1, ["rev"], 1e-2, 1e-2)
    assert (jnp.abs(jax.grad(weighted)(logits)).max(1) > 0).all()


def test_a_bias_evens_the_load():
    logits = jax.random.normal(jax.random.key(0), (512, 8)) + jnp.arange(8)[None] / 2
    router, bias = Router(num_experts=8, top_k=2, scores="sigmoid"), jnp.zeros(8)
    loads = []
    for _ in range(200):
        found = route(logits, router, bias=bias)
        loads.append(found.num_chosen)
        bias = move_bias(bias, found.num_chosen, 1e-2)
    assert float(loads[0].max() / loads[0].mean()) > 2
    assert float(loads[-1].max() / loads[-1].mean()) < 1.15
    assert abs(float(bias.mean())) < 1e-6


def test_sequences_have_losses_of_their_own():
    found = golden(1, "none", 1.0)
    first, second = (route(GOLDEN[i : i + 3], Router(num_experts=3)) for i in (0, 3))
    mean = (balance_loss(first) + balance_loss(second)) / 2
    close(balance_loss(found, num_sequences=2), mean)
    assert float(mean) != pytest.approx(float(balance_loss(found)), rel=1e-2)


def test_sequences_count_by_their_tokens():
    """Fails if a device with padding weighs as much as one without."""
    counts = jnp.array([1, 1, 1, 1, 0, 0], bool)
    router = Router(num_experts=3)
    found = route(GOLDEN, router, counts=counts)
    first = balance_loss(route(GOLDEN[:3], router))
    second = balance_loss(route(GOLDEN[3:4], router))
    close(balance_loss(found, num_sequences=2), (3 * first + second) / 4)


@pytest.mark.parametrize("sampling", ["first", "second"])
def test_noise_chooses_within_the_best_groups(sampling):
    logits = jax.random.normal(jax.random.key(0), (256, 8))
    router = Router(
        num_experts=8, top_k=2, num_groups=4, top_groups=1, sampling=sampling
    )
    experts = route(logits, router, key=jax.random.key(1)).experts
    assert (experts[:, 0] // 2 == experts[:, 1] // 2).all()


def test_small_sigmoid_scores_are_normalised_and_finite():
    router = Router(num_experts=3, top_k=2, scores="sigmoid")

    def weight(logits):
        routing = route(logits, router)
        return routing.weights[:, 0].sum() + balance_loss(routing), routing

    for level in (-16, -30, -60, -88, -120):
        logits = GOLDEN + level
        (value, routing), slope = jax.value_and_grad(weight, has_aux=True)(logits)
        assert np.isfinite(value) and np.isfinite(slope).all()
        if level >= -30:
            close(routing.weights.sum(1), 1)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_logits_are_products_in_float32(dtypes):
    """Fails if tokens or logits are rounded to the dtype of the model."""
    shapes = (32, 512), (512, 4)
    pairs = zip(jax.random.split(jax.random.key(0)), shapes, dtypes, strict=True)
    x, kernel = (jax.random.normal(*each) for each in pairs)
    found = router_logits(x, kernel)
    assert found.dtype == jnp.float32
    expected = np.float64(x) @ np.float64(kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_jitter_multiplies_tokens_while_training():
    x, kernel = jnp.ones((512, 2), jnp.bfloat16), jnp.eye(2, dtype=jnp.bfloat16)
    noisy = router_logits(x, kernel, jitter=0.01, key=jax.random.key(0))
    assert 0.99 <= float(noisy.min()) < 0.9901 and 1.0099 < float(noisy.max()) <= 1.01
    still = router_logits(x, kernel, jitter=0.01)
    np.testing.assert_array_equal(still, x)


SETTINGS = {
    "model": {
        "num_layers": 2,
        "embed_size": 1024,
        "num_heads": 2,
        "moe": {"every": 1, "num_experts": 4},
    },
}


@pytest.mark.parametrize("memory", ["none", "pinned_host"])
def test_matrices_of_routers_stay_float32(memory):
    """Fails if tokens are routed by logits of rounded weights."""
    config = zjax.load_config(SETTINGS, {"zero.offload": memory})
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    plan = make_plan(config, abstract_mesh(config.mesh, 8), model, tx)
    dtypes = {row.path: str(row.dtype) for row in jax.tree.leaves(plan.compute)}
    routers = {path: dtype for path, dtype in dtypes.items() if "router" in path}
    assert set(routers.values()) == {"float32"}
    assert {dtypes[path] for path in dtypes.keys() - routers} == {"bfloat16"}
