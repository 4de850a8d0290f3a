"""Optimizers of the config, their clipping and averages, against NumPy and optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax._src import alias

from tests.reference import optimizers as reference
from tests.reference import schedules as closed_form
from tests.support import optimizers, rules
from tests.support.refusals import config_error
from zjax.optim import build, transforms
from zjax.settings import schema
from zjax.typing import Model

NAMES = tuple(rules.RULES)
NUM_STEPS, PEAK, DECAY = 100, 3e-3, 0.1
RTOL = 2e-6
"""Float32 after 100 steps, relative to the parameter."""


def make_config(name, groups=(), num_steps=NUM_STEPS, **settings):
    fixed = {"num_warmup_steps": 10}
    optimizer = rules.optimizer(name, groups=groups, **fixed | settings)
    return schema.Config(num_steps=num_steps, optimizer=optimizer)


def constant(name, lr=0.01, groups=(), **settings):
    fixed = {"schedule": "constant", "num_warmup_steps": 0, "peak_learning_rate": lr}
    return make_config(name, groups, **fixed | settings)


def make_model(params, logical):
    return Model(
        init=lambda key: (params, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: logical,
    )


def draw(rng, shape):
    """Away from 0, where a relative error says nothing."""
    return rng.uniform(0.5, 2.0, size=shape) * rng.choice([-1, 1], size=shape)


def train(tx, params, grads):
    @jax.jit
    def run(params, grads):
        def step(carry, grad):
            params, state = carry
            updates, state = tx.update(grad, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]

    return run(params, grads)


ORACLES = {
    "adamw": lambda p, g, lr, c, wd: reference.adam(
        p, g, lr, b1=c.b1, b2=c.b2, eps=c.eps, decay=wd, decoupled=True
    ),
    "adam": lambda p, g, lr, c, wd: reference.adam(
        p, g, lr, b1=c.b1, b2=c.b2, eps=c.eps, decay=wd, decoupled=False
    ),
    "lamb": lambda p, g, lr, c, wd: reference.lamb(
        p, g, lr, b1=c.b1, b2=c.b2, eps=c.eps, decay=wd
    ),
    "lion": lambda p, g, lr, c, wd: reference.lion(
        p, g, lr, b1=c.b1, b2=c.b2, decay=wd
    ),
    "sgd": lambda p, g, lr, c, wd: reference.sgd(p, g, lr, momentum=c.b1, decay=wd),
    "sgd_l2": lambda p, g, lr, c, wd: reference.sgd(
        p, g, lr, momentum=c.b1, decay=wd, decoupled=False
    ),
}


@pytest.mark.parametrize(
    ("name", "b2"), [*((name, 0.95) for name in ORACLES), ("adamw", 0.999)]
)
def test_hundred_steps_equal_float64(name, b2):
    """Matrices decay and vectors do not; the learning rate follows its schedule."""
    rng = np.random.default_rng(1)
    shapes = {"kernel": (8, 16), "bias": (16,), "gain": (1,)}
    params = {k: draw(rng, s) for k, s in shapes.items()}
    grads = {k: rng.normal(size=(NUM_STEPS, *s)) for k, s in shapes.items()}
    narrow = jax.tree.map(np.float32, (params, grads))
    config = make_config(name, b2=b2, peak_learning_rate=PEAK)
    got = train(build.make_optimizer(config), *narrow)

    settings = config.optimizer.rule
    shape = dict(kind="cosine", num_steps=NUM_STEPS, num_warmup=10, final=0.1)
    rates = [
        PEAK * closed_form.fraction(step, decay_fraction=0.0, **shape)
        for step in range(NUM_STEPS)
    ]
    for key, param in params.items():
        decay = DECAY if key == "kernel" else 0.0
        start, path = np.float64(narrow[0][key]), np.float64(narrow[1][key])
        want = ORACLES[name](start, path, rates, settings, decay)
        np.testing.assert_allclose(got[key], want, rtol=RTOL)
        assert np.abs(want - param).max() > 1e-3


@pytest.mark.parametrize("name", sorted({*NAMES} - {"adam", "sgd_l2"}))
def test_decay_is_decoupled_and_spares_vectors(name):
    """Adafactor's own decay, for one, would not be multiplied by the learning rate."""
    params = {"kernel": jnp.full((8, 16), 2.0), "scale": jnp.full((2, 16), 2.0)}
    grads = jax.tree.map(jnp.zeros_like, params)
    tx = build.make_optimizer(constant(name, lr=0.01))
    updates, _ = tx.update(grads, tx.init(params), params)
    largest_ratio = 10.0 if name.endswith("lamb") else 1.0
    want = -0.01 * DECAY * 2.0 * largest_ratio
    np.testing.assert_allclose(updates["kernel"], want, rtol=1e-5)
    np.testing.assert_array_equal(updates["scale"], 0.0)
    tx = build.make_optimizer(constant(name, lr=0.01, decay_vectors=True))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["scale"], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("param", "grad", "update"),
    [
        (1e-4, 1.0, -0.01),
        (0.5, 1.0, -0.5),
        (1e4, 1.0, -10.0),
        (0.0, 1.0, -1.0),  # a norm of 0 has no ratio
        (1.0, 0.0, 0.0),
    ],
)
def test_lamb_keeps_its_ratio_within_limits(param, grad, update):
    """One step of Adam without decay has a norm of 4 on 16 elements."""
    params = {"bias": jnp.full(16, param)}
    tx = build.make_optimizer(constant("lamb", lr=1.0))
    updates, _ = tx.update({"bias": jnp.full(16, grad)}, tx.init(params), params)
    np.testing.assert_allclose(updates["bias"], update, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "onebit_lamb"])
def test_stacked_layers_train_like_separate_ones(name):
    """Fails if decay, LAMB's ratio or Muon's sides take a stack for one layer."""
    rng = np.random.default_rng(2)
    dims = {"kernel": ("embed", "mlp"), "gain": ("embed",)}
    layers = [
        {
            "kernel": np.float32(size * draw(rng, (8, 16))),
            "gain": np.float32(draw(rng, 8)),
        }
        for size in (0.3, 3.0)
    ]
    stacked = jax.tree.map(lambda *x: np.stack(x), *layers)
    stacked_dims = {key: ("layers", *names) for key, names in dims.items()}
    grads = [
        jax.tree.map(lambda x: np.float32(rng.normal(size=(3, *x.shape))), layer)
        for layer in layers
    ]
    stacked_grads = jax.tree.map(lambda *x: np.stack(x, axis=1), *grads)
    config = constant(name)
    model = make_model({"s": stacked}, {"s": stacked_dims})
    tx = build.make_optimizer(config, model)
    together = train(tx, {"s": stacked}, {"s": stacked_grads})["s"]
    model = make_model(layers, [dims, dims])
    apart = train(build.make_optimizer(config, model), layers, grads)
    for index, layer in enumerate(apart):
        for key, value in layer.items():
            np.testing.assert_allclose(together[key][index], value, rtol=1e-5)


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adam():
    params = {"kernel": jnp.ones((8, 16)), "embedding": jnp.ones((8, 16))}
    rng = np.random.default_rng(3)
    grads = {key: jnp.float32(rng.normal(size=(8, 16))) for key in params}
    tx = build.make_optimizer(constant("muon", lr=1.0, weight_decay=0.0))
    updates, _ = tx.update(grads, tx.init(params), params)
    singular = np.linalg.svd(updates["kernel"], compute_uv=False)
    size = 0.2 * np.sqrt(16)
    assert np.all((singular > 0.5 * size) & (singular < 1.4 * size))
    nesterov = 0.9 * 0.1 / (1 - 0.9**2) + 1
    np.testing.assert_allclose(np.abs(updates["embedding"]), nesterov, rtol=1e-4)


TREE = {
    "blocks": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)},
    "embedding": jnp.ones((31, 8)),
}


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_have_no_optimizer_memory_and_do_not_move(name):
    frozen = schema.ParamGroup(pattern="embedding", learning_rate_scale=0.0)
    tx = build.make_optimizer(constant(name, groups=(frozen,)))
    state = tx.init(TREE)
    assert all(31 not in leaf.shape for leaf in jax.tree.leaves(state))
    if name != "adafactor":
        assert any(leaf.shape == (8, 16) for leaf in jax.tree.leaves(state))
    updates, after = tx.update(TREE, state, TREE)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    np.testing.assert_array_equal(updates["embedding"], 0.0)
    assert np.abs(updates["blocks"]["kernel"]).min() > 0


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_group_scales_the_learning_rate_and_sets_the_decay(name):
    group = schema.ParamGroup(
        pattern="kernel$", learning_rate_scale=0.5, weight_decay=0.3
    )
    plain = build.make_optimizer(constant(name, weight_decay=0.3))
    grouped = build.make_optimizer(constant(name, groups=(group,), weight_decay=0.3))
    one, _ = plain.update(TREE, plain.init(TREE), TREE)
    two, _ = grouped.update(TREE, grouped.init(TREE), TREE)
    np.testing.assert_allclose(
        two["blocks"]["kernel"], 0.5 * one["blocks"]["kernel"], rtol=1e-6
    )
    np.testing.assert_allclose(two["embedding"], one["embedding"], rtol=1e-6)
    other = dataclasses.replace(group, weight_decay=0.0)
    grouped = build.make_optimizer(constant(name, groups=(other,), weight_decay=0.3))
    two, _ = grouped.update(TREE, grouped.init(TREE), TREE)
    moved = two["blocks"]["kernel"] - 0.5 * one["blocks"]["kernel"]
    np.testing.assert_allclose(moved, 0.5 * 0.01 * 0.3, rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_group_without_a_decay_of_its_own_has_that_of_the_others(name):
    """Fails if a group for another learning rate is not decayed."""
    group = schema.ParamGroup(pattern="kernel$", learning_rate_scale=0.5)
    updates = []
    for groups in ((), (group,), (dataclasses.replace(group, weight_decay=0.3),)):
        tx = build.make_optimizer(constant(name, groups=groups, weight_decay=0.3))
        updates.append(tx.update(TREE, tx.init(TREE), TREE)[0]["blocks"]["kernel"])
    np.testing.assert_array_equal(updates[1], updates[2])
    np.testing.assert_allclose(updates[1], 0.5 * updates[0], rtol=1e-6)


def test_groups_are_checked_against_the_model():
    typo = schema.ParamGroup(pattern="embeding")
    model = make_model(TREE, jax.tree.map(lambda x: None, TREE))
    with config_error(
        "optimizer.groups[0].pattern='embeding' matches none of 3 parameters; paths "
        "look like embedding, blocks/kernel, blocks/bias"
    ):
        build.make_optimizer(constant("adamw", groups=(typo,)), model)


def test_sgd_without_momentum_keeps_no_state():
    state = build.make_optimizer(constant("sgd", b1=0.0)).init(TREE)
    assert all(leaf.shape == () for leaf in jax.tree.leaves(state))


def make_grads(scale):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (64, 33), "bias": (7,), "gain": ()}
    return {k: np.float32(scale * rng.normal(size=s)) for k, s in shapes.items()}


@pytest.mark.parametrize("max_norm", [1e-8, 0.5, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4])
def test_clipping_equals_numpy(scale, max_norm):
    """The least of both: 1e-6 beside a norm of 5e-8 is most of the divisor."""
    grads = make_grads(scale)
    wide = {k: np.float64(g) for k, g in grads.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in wide.values()))
    divisor = max(1.0, (norm + 1e-6) / max_norm)

    mine = jax.jit(transforms.global_norm)(grads)
    np.testing.assert_allclose(mine, norm, rtol=1e-6)
    clipped = jax.jit(lambda g, n: transforms.clip_by_norm(g, n, max_norm))(grads, mine)
    for name, g in wide.items():
        np.testing.assert_allclose(clipped[name], g / divisor, rtol=2e-6)


def test_infinite_limit_changes_no_bit():
    grads = make_grads(1e4)
    clipped = transforms.clip_by_norm(grads, jnp.float32(1e9), float("inf"))
    for name, g in grads.items():
        np.testing.assert_array_equal(clipped[name], g)


def test_norms_and_clipping_of_bfloat16_round_once():
    """In bfloat16 the sum of 4100 ones would be 4096, and the divisor 1 or 1.0078."""
    norm = transforms.global_norm(jnp.ones(4100, jnp.bfloat16))
    np.testing.assert_allclose(norm, np.sqrt(4100), rtol=1e-6)
    assert transforms.global_norm({}) == 0.0
    grads = jnp.arange(1, 129, dtype=jnp.bfloat16)
    clipped = transforms.clip_by_norm(grads, jnp.float32(1.004), 1.0)
    expected = (np.arange(1, 129) / 1.004001).astype(jnp.bfloat16)
    np.testing.assert_array_equal(clipped, expected)
    tree = [jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)]
    clipped = transforms.clip_by_norm(tree, transforms.global_norm(tree), 0.1)
    assert [x.dtype.name for x in clipped] == ["bfloat16", "float32"]


def test_average_equals_numpy():
    rng = np.random.default_rng(0)
    path = rng.normal(size=(120, 5))
    want = path[0]
    got = {"w": jnp.float32(path[0])}
    update = jax.jit(lambda e, p, t: transforms.update_ema(e, p, 0.9, t))
    for step, params in enumerate(path):
        decay = min(0.9, (1 + step) / (10 + step))
        want = decay * want + (1 - decay) * params
        got = update(got, {"w": jnp.float32(params)}, jnp.int32(step))
        np.testing.assert_allclose(got["w"], want, rtol=1e-5, atol=1e-6)


def test_average_keeps_its_own_dtype():
    start = {"w": jnp.zeros(2, jnp.float32)}
    moved = transforms.update_ema(
        start, {"w": jnp.ones(2, jnp.bfloat16)}, 0.5, jnp.int32(99)
    )
    assert moved["w"].dtype == jnp.float32
    assert moved["w"].tolist() == [0.5, 0.5]


def published():
    makers = {
        name
        for name in dir(alias)
        if name.islower()
        and not name.startswith("_")
        and callable(getattr(alias, name))
        and getattr(optax, name, None) is getattr(alias, name)
    }
    parts = {
        f"contrib.{name}"
        for name in dir(contrib)
        if name.islower()
        and not name.startswith(("_", "scale_by_"))
        and callable(getattr(contrib, name))
    }
    return makers | parts


def test_table_covers_optax():
    listed = optimizers.OPTIMIZERS.keys() | optimizers.REFUSED.keys()
    extra = {"lookahead", "contrib.sam(opaque_mode)"}
    assert published() == (listed - extra) | optimizers.NOT_OPTIMIZERS
    assert not optimizers.OPTIMIZERS.keys() & optimizers.REFUSED.keys()
