"""Smaller moments in every built-in optimizer: what they are, and that they work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import rules
from zjax.optim import build, moments
from zjax.settings import schema
from zjax.sharding.layers import Layers
from zjax.typing import Model

NAMES = ("adamw", "adam", "lamb", "lion", "sgd", "sgd_l2", "muon")
SHAPES = {"kernel": (8, 16), "embedding": (31, 8), "bias": (16,)}
each_optimizer = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])


def make_tx(name, dtype, *, master="float32", model=None, **settings):
    fixed = {"num_warmup_steps": 0, "peak_learning_rate": 0.01, "moment_dtype": dtype}
    optimizer = rules.optimizer(name, "constant", **fixed | settings)
    precision = schema.Precision(master_dtype=master)
    config = schema.Config(optimizer=optimizer, precision=precision)
    return build.make_optimizer(config, model)


def make_params(shapes=SHAPES, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.array(rng.normal(size=s), dtype) for k, s in shapes.items()}


def make_model(params, dims):
    return Model(
        init=lambda key: (params, {}),
        loss=lambda *args: None,
        bind=lambda *args: None,
        logical=lambda params: dims,
    )


def moments_of(state):
    """The leaves of the state that have a parameter's name, by their place."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(keys, simple=True): leaf for keys, leaf in leaves}
    return {k: v for k, v in named.items() if any(name in k for name in SHAPES)}


def quantized_of(state):
    """Its matrices in eight bits, by their place."""

    def is_quantized(node):
        return isinstance(node, moments.Quantized)

    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized)
    return {
        jax.tree_util.keystr(keys): node for keys, node in leaves if is_quantized(node)
    }


def train(tx, params, num_steps, seed=1):
    """Steps on gradients of widely different sizes; returns parameters and state."""
    rng = np.random.default_rng(seed)
    sizes = {k: 10.0 ** rng.uniform(-4, 0, size=x.shape) for k, x in params.items()}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(num_steps):
        grads = {
            k: jnp.array(size * (0.3 + rng.normal(size=size.shape)), params[k].dtype)
            for k, size in sizes.items()
        }
        params, state = step(params, state, grads)
    return params, state


def test_every_optimizer_is_tested_or_refused():
    compressed = {"onebit_adam", "onebit_lamb", "zero_one_adam"}
    assert set(rules.RULES) == {*NAMES, "adafactor", *compressed}


@each_optimizer
def test_bfloat16_is_what_every_moment_rests_in(name):
    wide = moments_of(make_tx(name, "float32").init(make_params()))
    small = moments_of(make_tx(name, "bfloat16").init(make_params()))
    assert {leaf.dtype for leaf in wide.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in small.values()} == {jnp.dtype("bfloat16")}
    assert len(wide) == len(small) >= 3
    assert [x.shape for x in wide.values()] == [x.shape for x in small.values()]


@each_optimizer
def test_int8_is_what_every_moment_of_a_matrix_rests_in(name):
    state = make_tx(name, "int8").init(make_params())
    found = moments_of(state)
    codes = {k: x.dtype for k, x in found.items() if k.endswith("codes")}
    num_moments = 1 if name in ("lion", "sgd", "sgd_l2") else 2
    # Muon gives one moment to its matrix and two to the embedding.
    expected = 3 if name == "muon" else 2 * num_moments
    assert len(codes) == expected
    squares = {k for k in codes if "nu" in k.replace("num", "")}
    assert {codes[k] for k in squares} <= {jnp.dtype("uint8")}
    assert {codes[k] for k in set(codes) - squares} == {jnp.dtype("int8")}
    wide = {k: x for k, x in found.items() if x.dtype == jnp.float32}
    assert all("bias" in k or "scales" in k for k in wide)
    for key, leaf in wide.items():
        if "scales" in key:
            assert sorted(leaf.shape)[0] == 1 and leaf.ndim == 2


@each_dtype
@each_optimizer
def test_fifty_steps_are_those_of_float32_but_for_rounding(name, dtype):
    """Fails if a moment is read wrongly, or one that rounds badly stops a parameter."""
    start = make_params()
    want, _ = train(make_tx(name, "float32"), start, 50)
    got, state = train(make_tx(name, dtype), start, 50)
    assert int(state.count) == 50
    for key in SHAPES:
        moved = np.linalg.norm(want[key] - start[key])
        apart = np.linalg.norm(got[key] - want[key])
        assert moved > 0.01
        assert apart < moved * {"bfloat16": 0.015, "int8": 0.08}[dtype], key
    if dtype == "int8":
        np.testing.assert_allclose(got["bias"], want["bias"], rtol=1e-5)


def test_moments_of_bfloat16_parameters_have_the_dtype_they_are_given():
    """Fails if moments follow the parameters, or updates the moments."""
    params = make_params(dtype=jnp.bfloat16)
    for dtype in ("float32", "bfloat16"):
        tx = make_tx("adamw", dtype, master="bfloat16")
        updates, state = tx.update(params, tx.init(params), params)
        found = {x.dtype for x in moments_of(state).values()}
        assert found == {jnp.dtype(dtype)}
        assert {x.dtype for x in updates.values()} == {jnp.dtype("bfloat16")}


def test_float32_moments_are_those_of_optax():
    assert type(make_tx("adamw", "float32").init(make_params())[0]).__name__ == (
        "ScaleByAdamState"
    )


def test_adafactor_keeps_its_own_moments():
    params = make_params()
    own = make_tx("adafactor", "float32").init(params)
    narrow = make_tx("adafactor", "float32", master="bfloat16").init(params)
    assert jax.tree.structure(own) == jax.tree.structure(narrow)


@each_dtype
def test_frozen_parameters_have_no_moments(dtype):
    frozen = schema.ParamGroup(pattern="embedding", learning_rate_scale=0.0)
    slow = schema.ParamGroup(pattern="kernel", learning_rate_scale=0.5)
    tx = make_tx("adamw", dtype, groups=(frozen, slow))
    start = make_params()
    after, state = train(tx, start, 3)
    assert all("embedding" not in key for key in moments_of(state))
    expected = 8 if dtype == "int8" else 4
    assert len(moments_of(state)) == expected
    np.testing.assert_array_equal(after["embedding"], start["embedding"])
    assert np.abs(after["kernel"] - start["kernel"]).min() > 0


@each_optimizer
def test_stacked_layers_are_scaled_each_by_itself(name):
    """Fails if one layer of large gradients takes the digits of another."""
    shapes = {"kernel": (3, 8, 16), "gain": (3, 16)}
    dims = {"kernel": ("layers", "embed", "mlp"), "gain": ("layers", "embed")}
    params = make_params(shapes)
    given = {"model": make_model(params, dims), "weight_decay": 0.0}
    tx = make_tx(name, "int8", **given)
    state = tx.init(params)
    for node in quantized_of(state).values():
        assert node.codes.shape == (3, 8, 16)
        assert [x.shape for x in node.scales] == [(3, 8, 1), (3, 1, 16)]
    grads = {k: jnp.ones(s) for k, s in shapes.items()}
    grads["kernel"] *= jnp.array([1e-12, 1.0, 1e6])[:, None, None]
    _, state = tx.update(grads, state, params)
    plain = make_tx(name, "float32", **given)
    _, expected = plain.update(grads, plain.init(params), params)
    wide = [x for x in jax.tree.leaves(expected) if x.shape == (3, 8, 16)]
    got = [moments.dequantize(node) for node in quantized_of(state).values()]
    assert len(got) == len(wide) >= 1
    for one, other in zip(got, wide, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@each_dtype
def test_second_moment_forgets_large_gradients(dtype):
    """Fails under rounding to the nearest: under b2 = 0.999 nothing would move."""
    params = {"kernel": jnp.ones((32, 32))}
    tx = make_tx("adamw", dtype, b2=0.999)

    @jax.jit
    def steps(state, size):
        grads = jax.tree.map(lambda x: size * x, params)

        def step(state, _):
            return tx.update(grads, state, params)[1], None

        return jax.lax.scan(step, state, None, length=700)[0]

    state = steps(steps(tx.init(params), 1.0), 0.0)
    if dtype == "int8":
        _, nu = map(moments.dequantize, quantized_of(state).values())
    else:
        nu = state.state[0].nu["kernel"].astype(jnp.float32)
    want = (1 - 0.999**700) * 0.999**700
    np.testing.assert_allclose(nu.mean(), want, rtol=0.03)


def test_rounding_differs_from_step_to_step_and_between_moments():
    """Fails if the bits are those of the step, of the moment or of the layer before."""
    layers = Layers([jnp.ones((32, 32))] * 2, "kernel")
    params = {"blocks": layers, "other": jnp.ones((32, 32))}
    tx = make_tx("sgd", "bfloat16", b1=1e-6)
    grads = jax.tree.map(lambda x: x * (1 + 2**-8), params)  # halfway between two
    state, up = tx.init(params), []
    for _ in range(2):
        _, state = tx.update(grads, state, params)
        up += [np.asarray(x > 1) for x in jax.tree.leaves(state.state[0].trace)]
    assert len(up) == 6
    for index, one in enumerate(up):
        for other in up[index + 1 :]:
            assert abs((one == other).mean() - 0.5) < 5 * 0.5 / 32


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_moments_are_the_same_where_numbers_are_wide_by_default(dtype):
    """Fails if scales are float64, which codes of 32 bits do not fit."""
    params = make_params()
    narrow, _ = train(make_tx("adamw", dtype), params, 2)
    with jax.enable_x64(True):
        wide, state = train(make_tx("adamw", dtype), params, 2)
    assert "float64" not in {str(x.dtype) for x in jax.tree.leaves(state)}
    for name, x in wide.items():
        np.testing.assert_allclose(x, narrow[name], rtol=1e-5, err_msg=name)
