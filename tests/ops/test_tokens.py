"""Operations on tokens against NumPy: tables, positions, activations, subsets."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.reference import attention as reference
from tests.support.language import BERT, GPT, make_language_model, sums_of
from zjax.models.build import make_model
from zjax.ops import activation, lookup, rotary
from zjax.ops.lookup import look_up
from zjax.ops.tokens import draw_subset, on_subset
from zjax.run.build import make_run
from zjax.settings.schema import Config, Data, Mesh, Precision
from zjax.typing import IGNORED

X, Y = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "args"), [(activation.gelu, (X,)), (activation.swiglu, (X, Y))]
)
def test_backward_pass_keeps_what_entered(function, args):
    """Fails if passes that are apart keep more than the formula of memory counts."""
    _, pull = jax.vjp(function, *args)
    kept = [x for x in jax.tree.leaves(pull) if jnp.size(x) > 1]
    assert len(kept) == len(args)
    for x, given in zip(kept, args, strict=True):
        np.testing.assert_array_equal(x, given)


def test_values_and_slopes():
    slopes = jax.vmap(jax.grad(activation.gelu))(X.reshape(-1))
    inner = np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)
    steep = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * X**2)
    expected = 0.5 * (1 + np.tanh(inner)) + 0.5 * X * steep / np.cosh(inner) ** 2
    np.testing.assert_allclose(slopes.reshape(X.shape), expected, rtol=1e-4, atol=1e-5)
    found = activation.swiglu(X, Y)
    np.testing.assert_allclose(found, X / (1 + np.exp(-X)) * Y, rtol=1e-5)


RNG = np.random.default_rng(0)
HEADS = RNG.normal(size=(2, 6, 3, 8)).astype(np.float32)
POSITIONS = RNG.integers(0, 5000, size=(2, 6))


def test_rotation_equals_the_reference():
    tables = rotary.make_rotary_tables(jnp.array(POSITIONS), head_size=8, theta=500.0)
    expected = reference.rotate(HEADS, POSITIONS, 500.0)
    np.testing.assert_allclose(
        rotary.rotate(jnp.array(HEADS), *tables), expected, atol=2e-3
    )


def test_adjacent_channels_rotate_as_halves_that_were_interleaved():
    """Fails if pairs are others, or channels that do not rotate move."""
    tables = rotary.make_rotary_tables(jnp.array(POSITIONS), head_size=6)
    interleaved = HEADS[..., [0, 3, 1, 4, 2, 5, 6, 7]]
    np.testing.assert_array_equal(
        rotary.rotate(jnp.array(interleaved), *tables, "adjacent"),
        rotary.rotate(jnp.array(HEADS), *tables),
    )


def test_scores_depend_on_distance_alone():
    def score(query_position, key_position):
        positions = jnp.array([[query_position, key_position]])
        tables = rotary.make_rotary_tables(positions, head_size=8)
        q, k = rotary.rotate(jnp.array(HEADS[:1, :2]), *tables)[0]
        return np.sum(q * k)

    np.testing.assert_allclose(score(7, 3), score(107, 103), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_bfloat16_heads_are_rotated_in_float32():
    """Fails if the tables or the products are bfloat16: positions would collide."""
    positions = jnp.array([[4000, 4001, 4002, 4003, 4004, 4005]] * 2)
    tables = rotary.make_rotary_tables(positions, head_size=8)
    assert tables[0].dtype == jnp.float32
    narrow = jnp.bfloat16(HEADS)
    expected = rotary.rotate(narrow.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotary.rotate(narrow, *tables), expected)


def gradient(table, indices, cotangent, deterministic=False):
    def rows(table):
        return look_up(table, indices, deterministic)

    return jax.vjp(rows, table)[1](cotangent)[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_their_gradient(monkeypatch, dtype, deterministic):
    monkeypatch.setattr(lookup, "ROWS_AT_ONCE", 4)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(7, 3)), dtype)
    indices = jnp.asarray(rng.integers(0, 7, (2, 5)))
    cotangent = jnp.asarray(rng.normal(size=(2, 5, 3)), dtype)
    np.testing.assert_array_equal(look_up(table, indices), table[indices])
    expected = np.zeros((7, 3))
    np.add.at(expected, indices, np.asarray(cotangent, np.float64))
    found = gradient(table, indices, cotangent, deterministic)
    assert found.dtype == table.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        expected,
        rtol=1e-2 if dtype != "float32" else 1e-6,
    )


def test_a_frequent_row_loses_nothing():
    """Fails if rows are added up in bfloat16, where 256 + 1 is 256."""
    table, indices = jnp.zeros((2, 1), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
    found = gradient(table, indices, jnp.ones((4096, 1), jnp.bfloat16))
    assert found.tolist() == [[4096.0], [0.0]]


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["none", "training"])
def test_deterministic_models_add_nothing_in_passing(key):
    """Fails if `deterministic` leaves a sum to the order of threads."""
    config = Config(model=GPT, data=Data(length=8), deterministic=True)
    model = make_model(config)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = {name: jnp.zeros((2, 8), jnp.int32) for name in ("tokens", "targets")}

    def loss(params):
        return model.loss(params, state, batch, key).value

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert "scatter-add" not in text
    assert "dot_general" in text


@pytest.mark.parametrize("config", [GPT, BERT])
def test_models_look_up_all_their_tables_so(config):
    """Fails if a table of a model is read in another way."""
    model = make_language_model(config)
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    numbers = jnp.zeros((2, 8), jnp.int32)
    names = ("tokens", "targets", "positions", "segment_ids", "token_types")
    batch = dict.fromkeys(names, numbers) | {"weights": jnp.ones((2, 8))}

    def loss(state):
        return sums_of(nnx.merge(graph, state), batch).loss_sum

    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    added = re.findall(r":(\w+)\[\d+,\d+\] = scatter-add", text)
    assert len(added) >= 2
    assert {*added} == {"f32"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_no_row_finds_zeros_and_adds_nothing(deterministic):
    """Fails if numbers count from the end, or are clamped to the last row, which no
    table that devices share does."""
    table, indices = jnp.ones((3, 1)), jnp.array([-1, 3, -100, 2])
    assert look_up(table, indices).tolist() == [[0], [0], [0], [1]]
    found = gradient(table, indices, jnp.ones((4, 1)), deterministic)
    assert found.tolist() == [[0], [0], [1]]


def evaluated(tensor, batch):
    """Loss and weight of a batch that is on the devices already."""
    config = Config(
        global_batch_size=2,
        model=GPT,
        data=Data(length=8),
        mesh=Mesh(tensor=tensor),
        precision=Precision(compute_dtype="float32"),
    )
    model, devices = make_model(config), jax.devices()[:tensor]
    run = make_run(config, model, optax.sgd(0.1), devices=devices)
    metrics = run.evaluate(run.state, batch)
    return float(metrics["loss"]), float(metrics["weight"])


def test_meshes_agree_on_ids_that_have_no_row():
    """Fails if the loss depends on how many devices hold the vocabulary."""
    tokens = jnp.arange(16).reshape(2, 8)
    targets = tokens.at[0, :2].set(IGNORED)
    outside = tokens.at[0, 3].set(GPT.vocab_size).at[1, 2].set(-1)
    batches = [{"tokens": x, "targets": targets} for x in (tokens, outside)]
    alone, of_two = ([evaluated(n, batch) for batch in batches] for n in (1, 2))
    np.testing.assert_allclose(of_two, alone, rtol=1e-6)
    assert alone[0][0] != alone[1][0]
    assert [weight for _, weight in alone] == [14, 14]


ROWS, LENGTH, WIDTH, KEPT = 3, 8, 4, 5
STREAM = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
MATRIX = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)
INDICES = jnp.array([[0, 2, 3, 6, 7], [1, 2, 4, 5, 6], [0, 1, 2, 3, 4]])
DROPPED = np.ones((ROWS, LENGTH), bool)
np.put_along_axis(DROPPED, np.asarray(INDICES), False, axis=1)


def layer(x, matrix=MATRIX):
    """Mixes neighbours, so that the order of the tokens counts."""
    return jnp.tanh(x @ matrix) + jnp.cumsum(x, axis=1), ()


def by_loops(x):
    y = x.copy()
    for row, indices in enumerate(np.asarray(INDICES)):
        part = np.stack([x[row, i] for i in indices])
        new = np.tanh(part @ MATRIX) + np.cumsum(part, axis=0)
        for i, token in zip(indices, new, strict=True):
            y[row, i] = token
    return y


def test_layer_replaces_its_tokens_alone():
    """The others are the same bits; fails if they are lost, or in another order."""
    y = np.asarray(jax.jit(lambda x: on_subset(layer, x, INDICES)[0])(STREAM))
    np.testing.assert_allclose(y, by_loops(STREAM), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y[DROPPED], STREAM[DROPPED])


def test_gradients_are_those_of_finite_differences():
    """A dropped token has the outgoing gradient, one that is kept the layer's alone."""
    weights = RNG.normal(size=STREAM.shape)
    with jax.enable_x64(True):

        def loss(x):
            return jnp.sum(on_subset(layer, x, INDICES)[0] * weights)

        found = jax.grad(loss)(jnp.asarray(STREAM, jnp.float64))
        steps = 1e-6 * np.eye(STREAM.size).reshape(-1, *STREAM.shape)
        ahead, behind = (jax.vmap(loss)(STREAM + sign * steps) for sign in (1, -1))
        wanted = np.asarray((ahead - behind) / 2e-6).reshape(STREAM.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(np.asarray(found)[DROPPED], weights[DROPPED])


def test_backward_pass_writes_the_rows_of_the_subset_alone():
    """No sum, product or copy of the whole stream, in no dtype."""
    x = jnp.asarray(STREAM, jnp.bfloat16)

    def backward(x, cotangent):
        _, pull = jax.vjp(lambda x: on_subset(lambda x: (2 * x, ()), x, INDICES)[0], x)
        return pull(cotangent)

    jaxpr = jax.make_jaxpr(backward)(x, x)
    whole = [
        equation.primitive.name
        for equation in jaxpr.eqns
        if equation.outvars[0].aval.shape == STREAM.shape
        and not equation.primitive.name.startswith("custom_vjp")
    ]
    assert whole == ["scatter"]


@pytest.mark.parametrize("num_kept", [1, KEPT, LENGTH])
def test_subsets_are_sorted_and_uniform(num_kept):
    """Each token has the same chance, rows and layers are independent."""
    keys = jax.random.split(jax.random.key(0), 2000)

    def draw(key):
        return draw_subset(key, num_rows=2, length=LENGTH, num_kept=num_kept)

    indices = np.asarray(jax.jit(jax.vmap(draw))(keys))
    assert indices.shape == (2000, 2, num_kept)
    assert (np.diff(indices, axis=-1) > 0).all()
    is_kept = np.zeros((2000, 2, LENGTH))
    np.put_along_axis(is_kept, indices, 1, axis=-1)
    share = num_kept / LENGTH
    spread = 4 * np.sqrt(share * (1 - share) / 2000)
    assert np.abs(is_kept.mean(axis=0) - share).max() <= spread
    pairs = (is_kept[:, 0] - share) * (is_kept[:, 1] - share)  # of two rows
    layers = (is_kept[1:, 0] - share) * (is_kept[:-1, 0] - share)  # of two keys
    for products in (pairs, layers):
        assert abs(products.mean()) <= 4 * share * (1 - share) / np.sqrt(2000 * 7)


def test_rows_of_devices_draw_as_rows_of_one_batch():
    """Fails if a row draws by its place on its device."""
    key = jax.random.key(1)
    mesh = jax.make_mesh((4,), ("data",))
    draw = jax.shard_map(
        lambda: draw_subset(key, num_rows=2, length=LENGTH, num_kept=KEPT),
        mesh=mesh,
        in_specs=(),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    wanted = draw_subset(key, num_rows=8, length=LENGTH, num_kept=KEPT)
    np.testing.assert_array_equal(jax.jit(draw)(), wanted)
