"""Progressive layer drop: what a step trains, and in how many programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small_run
from tests.support.cases import some_by_hand
from tests.support.trees import assert_close
from zjax.models.build import make_model
from zjax.offload import blockwise
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.sharding import plan
from zjax.stack.dropping import BlockInput, Tally, make_inputs, run_block
from zjax.stack.forward import Execution, combine, run_stack
from zjax.typing import Auxiliary, Dropping, Segment, Stack

SETTINGS = "model.num_layers=3", "layer_drop.theta=0.5", "layer_drop.gamma=0.3"
X = jnp.arange(6.0).reshape(2, 3)


def block(params, x, context, given):
    return x + jnp.sin(params * x), Auxiliary(metrics={"size": jnp.mean(jnp.abs(x))})


def inputs(key, theta):
    keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(1, 5))
    return make_inputs(keys, Dropping(theta=jnp.float32(theta)), range(4), None)


def test_blocks_are_kept_by_their_depth():
    """1 - l / L (1 - theta) for block l from 1: the first is dropped, too."""
    keys = jax.random.split(jax.random.key(0), 4096)
    given = jax.vmap(lambda key: inputs(key, 0.5))(keys)
    assert given.is_kept is not None and given.probability is not None
    wanted = np.array([0.875, 0.75, 0.625, 0.5])
    np.testing.assert_allclose(given.probability[0], wanted)
    spread = 4 * np.sqrt(wanted * (1 - wanted) / 4096)
    assert (np.abs(given.is_kept.mean(axis=0) - wanted) < spread).all()
    pairs = np.corrcoef(np.asarray(given.is_kept, float).T) - np.eye(4)
    assert np.abs(pairs).max() < 4 / np.sqrt(4096)


def test_mean_over_draws_is_the_block_that_always_runs():
    """Fails without the division, or with that of another layer."""
    keys = jax.random.split(jax.random.key(0), 4096)

    def draw(key):
        given = jax.tree.map(lambda x: x[2], inputs(key, 0.5))
        return run_block(block, 1.0, X, None, given)[0]

    found = np.asarray(jax.jit(jax.vmap(draw))(keys))
    full = np.asarray(block(1.0, X, None, None)[0])
    deviation = np.abs(full - X) * np.sqrt((1 - 0.625) / 0.625)
    assert (np.abs(found.mean(axis=0) - full) <= 3 * deviation / 64 + 1e-5).all()


@pytest.mark.parametrize("is_kept", [True, False])
def test_values_and_gradients_of_one_draw(is_kept):
    """A dropped block passes the gradient on, and has none itself."""
    given = BlockInput(None, None, jnp.asarray(is_kept), jnp.float32(0.625))
    wanted_factor = is_kept / 0.625

    def wanted(params, x):
        return jnp.sum(jnp.cos(x + wanted_factor * jnp.sin(params * x)))

    def found(params, x):
        return jnp.sum(jnp.cos(run_block(block, params, x, None, given)[0]))

    for function in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
        assert_close(
            function(found)(0.7, X), function(wanted)(0.7, X), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_block_adds_to_the_loss_is_scaled_and_counts_are_exact(is_kept):
    """Fails if experts of dropped layers count, or balance others by too little."""

    def counting(params, x, context, given):
        metrics = {"size": jnp.float32(5)}
        return x, Auxiliary(jnp.sum(params * x), metrics, {"load": jnp.int32(3)})

    given = BlockInput(None, None, jnp.asarray(is_kept), jnp.float32(0.625))

    def loss(params):
        _, auxiliary = run_block(counting, params, X, None, given)
        return 2 * auxiliary.loss, auxiliary

    gradient, auxiliary = jax.grad(loss, has_aux=True)(1.0)
    assert gradient == pytest.approx(is_kept * 2 * 15 / 0.625)
    assert auxiliary.loss == pytest.approx(is_kept * 15 / 0.625)
    assert auxiliary.metrics["size"] == (is_kept * 5, is_kept)
    assert auxiliary.totals["load"] == is_kept * 3


def test_metrics_are_means_over_the_blocks_that_ran():
    """In one program, in a scan, and 0 if none did; fails if others count as 0."""
    key = next(key for key in map(jax.random.key, range(99)) if 0 < ran(key).sum() < 4)

    def step(params, x, context, key):
        return x, Auxiliary(metrics={"number": params})

    numbers, theta = jnp.arange(1.0, 5.0), jnp.float32(0.5)
    stack = Stack(
        embed=lambda params, batch, key: (batch["x"], ()),
        segments=(Segment(step, 4),),
        head=lambda params, x, batch: (jnp.sum(x), jnp.float32(1), {}),
        split=lambda params: ((), (params,), ()),
        join=lambda embed, segments, head: segments[0],
    )
    batch, dropping = {"x": X}, Dropping(theta=theta)
    for execution in (Execution(0), Execution(2)):
        _, auxiliaries = run_stack(stack, numbers, batch, key, execution, dropping)
        found = combine(auxiliaries).metrics["number"]
        assert found == pytest.approx(float(numbers[ran(key)].mean()))
    tally = Tally(jnp.float32(0), jnp.float32(0))
    none = Auxiliary()._replace(metrics={"number": tally})
    assert combine([none, none]).metrics["number"] == 0
    halves = combine([combine_sums(auxiliaries)], [4])
    assert halves.metrics["number"] == pytest.approx(float(found))


def ran(key):
    return np.asarray(inputs(key, 0.5).is_kept)


def combine_sums(auxiliaries):
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), auxiliaries)


def test_a_dropped_block_runs_a_branch_without_products():
    """Fails if a block is computed and multiplied by 0, or copies its parameters."""
    given = BlockInput(None, None, jnp.asarray(True), jnp.float32(0.5))

    def product(params, x, context, given):
        return x + jnp.sin(x @ params), Auxiliary()

    def loss(params):
        return jnp.sum(run_block(product, params, X, None, given)[0] ** 2)

    program = jax.make_jaxpr(jax.grad(loss))(jnp.eye(3))
    forward, backward = [x for x in program.eqns if x.primitive.name == "cond"]
    for cond in (forward, backward):
        skip, run = (
            {e.primitive.name for e in x.eqns} for x in cond.params["branches"]
        )
        assert "dot_general" not in skip and "dot_general" in run
    assert "dot_general" not in [x.primitive.name for x in program.eqns]
    assert (3, 3) not in [x.aval.shape for x in forward.outvars]


def train(num_devices, *overrides):
    """Losses, and norms of the gradients of each layer's first matrix."""
    config = small_run.make_config(
        "runs/none", *SETTINGS, "model.dropout_rate=0", "optimizer.rule=sgd", *overrides
    )
    model = make_model(config)
    tx = make_optimizer(config, model)
    run = make_run(config, model, tx, devices=jax.devices()[:num_devices])
    tokens = np.random.default_rng(0).integers(0, 61, (16, 16), np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    state, losses = run.state, []
    for _ in range(4):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def test_devices_drop_the_same_layers():
    """Fails if a device draws by itself: at stage 3 they gather layers together."""
    model = (
        "model.num_layers=2",
        "model.layers_per_scan=1",
        "model.moe.num_experts=4",
        "model.moe.balance_loss=0",
        "layer_drop.gamma=5",
    )
    split = "zero.stage=3", "mesh.tensor=2", "mesh.expert=2"
    np.testing.assert_allclose(train(8, *model, *split), train(1, *model), rtol=1e-5)


HOST = "zero.offload=pinned_host", "zero.offload.parameter_memory=pinned_host"
EXPERTS = (
    "model.moe.num_experts=4",
    "model.moe.bias_rate=0.01",
    "model.remat=full",
    "model.activation_memory=pinned_host",
)
ON_HOST = {
    "microbatches": ("num_microbatches=2",),
    "experts, inputs on the host": EXPERTS,
    "experts, inputs on the host, microbatches": ("num_microbatches=2", *EXPERTS),
}
BY_HAND = {"microbatches", "experts, inputs on the host"}
"""What the last one holds at once."""


@pytest.mark.parametrize("name", some_by_hand(ON_HOST, BY_HAND))
def test_blocks_from_the_host_are_dropped_where_they_are(name, monkeypatch):
    """The same training; fails if blocks that do not run are computed, or if layers
    are dropped in one of the two places alone."""
    ran, settings = [], ON_HOST[name]
    real = blockwise.BlockwiseBackward.trunk_forward

    def counted(self, trunk, *args):
        ran.append(trunk.block)
        return real(self, trunk, *args)

    monkeypatch.setattr(blockwise.BlockwiseBackward, "trunk_forward", counted)
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 1)
    found = train(2, *HOST, *settings)
    on_device = [x for x in settings if "activation_memory" not in x]
    np.testing.assert_allclose(found, train(1, *on_device), rtol=1e-5)
    passes = 4 * (2 if "num_microbatches=2" in settings else 1)
    counts = [ran.count(block) for block in range(3)]
    assert counts[0] <= passes and counts[2] < passes and sum(counts) < 3 * passes
