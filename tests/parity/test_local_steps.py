"""Replicas that take local steps, against explicit workers in NumPy."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.reference import compression
from tests.support import models, rules, runs, totals
from tests.support.crossing import crossing
from tests.support.replicas import note_programs
from tests.support.trees import assert_close
from zjax.errors import PlanError
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run as make_planned_run
from zjax.settings import schema
from zjax.train.update import make_update

LEARNING_RATE = 0.5
REPLICA8 = schema.Mesh(replica=8)
NO_CLIPPING = schema.Optimizer(clip_norm=math.inf)
FRAGMENTS = {1: [["down", "up", "bias"]], 2: [["down", "bias"], ["up"]]}
"""Arrays of each fragment, by the number of fragments; in the order of the wire."""


def make_run(tx=None, stage=0, mesh=REPLICA8, **settings):
    return runs.make_small_run(
        tx or optax.sgd(LEARNING_RATE),
        stage,
        mesh=mesh,
        optimizer=NO_CLIPPING,
        communication=with_rounds(**settings),
    )


def with_rounds(codec="none", **settings):
    local_steps = schema.LocalSteps(**settings) if settings else None
    return schema.Communication(codec=codec, local_steps=local_steps)


def make_batch(step):
    """Rows of equal weight, so that replicas weigh alike."""
    return models.make_batch(step) | {"weight": np.ones(models.BATCH, np.float32)}


def replicas_of(state):
    return jax.tree.map(np.asarray, state.extra.replicas.master)


def anchor_of(state):
    return jax.tree.map(np.asarray, state.master)


def sent(x, codec):
    """What a receiver has."""
    if codec == "none":
        return x
    return compression.restored(codec, x.ravel(), block=2048).reshape(x.shape)


class Workers:
    """Streaming DiLoCo with one process per replica, in NumPy."""

    def __init__(self, number, settings):
        communication = with_rounds(**settings)
        self.number, self.settings = number, communication.local_steps
        self.wire = functools.partial(sent, codec=communication.codec)
        self.anchor = jax.tree.map(np.asarray, models.init(KEY))
        self.momentum = {name: 0 * x for name, x in self.anchor.items()}
        self.params = [dict(self.anchor) for _ in range(number)]
        self.worker_errors = collections.defaultdict(lambda: np.float32(0))
        self.server_errors = collections.defaultdict(lambda: np.float32(0))
        self.on_the_way = {}

    def step(self, number):
        settings, batch = self.settings, make_batch(number - 1)
        if number <= settings.num_synchronous_steps:
            return self.synchronous_step(batch)
        number -= settings.num_synchronous_steps
        length, fragments = settings.num_steps, FRAGMENTS[settings.num_fragments]
        for i, params in enumerate(self.params):
            rows = {name: x.reshape(self.number, -1, *x.shape[1:])[i]
                    for name, x in batch.items()}  # fmt: skip
            grads = GRADIENTS(params, rows)
            for name, grad in grads.items():
                params[name] = params[name] - LEARNING_RATE * np.asarray(grad)
        for i, names in enumerate(fragments):
            end = (i + 1) * length // len(fragments)
            if (number + settings.delay - end) % length == 0:
                self.on_the_way[i] = self.mean(i, names)
            if (number - end) % length == 0:
                self.merge(names, self.on_the_way.pop(i))

    def synchronous_step(self, batch):
        for name, grad in GRADIENTS(self.anchor, batch).items():
            self.anchor[name] = self.anchor[name] - LEARNING_RATE * np.asarray(grad)
        self.params = [dict(self.anchor) for _ in self.params]

    def mean(self, fragment, names):
        """Two phases: workers send chunks to servers, which send means to all."""
        chunks = []
        for i, params in enumerate(self.params):
            flat = [(self.anchor[n] - params[n]).ravel() for n in names]
            flat = np.concatenate(flat)
            padded = np.zeros(2048 * self.number, np.float32)
            padded[: len(flat)] = flat
            message = padded + self.worker_errors[fragment, i]
            self.worker_errors[fragment, i] = message - self.wire(message)
            chunks.append(self.wire(message).reshape(self.number, -1))
        means = []
        for j in range(self.number):
            message = np.mean([c[j] for c in chunks], 0, np.float32)
            message = message + self.server_errors[fragment, j]
            self.server_errors[fragment, j] = message - self.wire(message)
            means.append(self.wire(message))
        flat = np.concatenate(means)
        return flat

    def merge(self, names, flat):
        settings, start = self.settings, 0
        for name in names:
            old = self.anchor[name]
            grad = flat[start : start + old.size].reshape(old.shape)
            start += old.size
            decay, rate = settings.outer_momentum, settings.outer_learning_rate
            self.momentum[name] = decay * self.momentum[name] + grad
            self.anchor[name] = old - rate * (grad + decay * self.momentum[name])
            for params in self.params:
                own = settings.mixing * params[name]
                params[name] = own + (1 - settings.mixing) * self.anchor[name]


KEY = jax.random.key(0)
GRADIENTS = jax.jit(jax.grad(lambda p, rows: models.loss(p, {}, rows, None).value))
STREAMED = {"num_steps": 4, "num_fragments": 2, "delay": 1, "mixing": 0.25}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_steps": 3}, id="diloco"),
        pytest.param({"num_steps": 3, "codec": "int4"}, id="diloco-int4"),
        pytest.param({"num_steps": 3, "codec": "int2"}, id="diloco-int2"),
        pytest.param({"num_steps": 4, "delay": 2}, id="delayed"),
        pytest.param({"codec": "int4"} | STREAMED, id="streaming"),
        pytest.param(
            {"codec": "int4", "num_synchronous_steps": 4} | STREAMED, id="synchronous"
        ),
    ],
)
def test_twelve_steps_are_those_of_explicit_workers(settings):
    """Fails for sums in place of means, lost momentum, errors or fragments."""
    run = make_run(**settings)
    workers = Workers(8, settings)
    workers.anchor = anchor_of(run.state)
    workers.params = [dict(workers.anchor) for _ in range(8)]
    state = run.state
    for number in range(1, 13):
        workers.step(number)
        state, _ = run.step(state, make_batch(number - 1))
        for name, expected in workers.anchor.items():
            np.testing.assert_allclose(
                anchor_of(state)[name], expected, rtol=0, atol=2e-6
            )
            np.testing.assert_allclose(
                replicas_of(state)[name],
                [params[name] for params in workers.params],
                rtol=0,
                atol=2e-6,
            )


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(REPLICA8, 0), (schema.Mesh(replica=2), 3)],
)
def test_rounds_of_one_step_are_data_parallelism(mesh, stage):
    """The outer optimizer is SGD with learning rate 1 and no momentum."""
    one = {"num_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    states, losses = [], []
    for settings in ({}, one):
        run = make_run(stage=stage, mesh=mesh, **settings)
        state = run.state
        for step in range(4):
            state, _ = run.step(state, make_batch(step))
        states.append(anchor_of(state))
        losses.append(float(run.step.evaluate(state, make_batch(9))["loss"]))
    assert_close(*states, rtol=0, atol=1e-6)
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_replicas_are_equal_after_an_exchange_alone():
    run = make_run(optax.adam(0.01), codec="int4", num_steps=3)
    state = run.state
    for number in range(1, 7):
        state, _ = run.step(state, models.make_batch(number))
        anchor, replicas = anchor_of(state), replicas_of(state)
        same = {name: (x == anchor[name]).all() for name, x in replicas.items()}
        assert set(same.values()) == {number % 3 == 0}


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(schema.Mesh(replica=2), 3), (schema.Mesh(replica=4, tensor=2), 0)],
)
def test_a_local_step_sends_nothing_to_other_replicas(mesh, stage):
    """Neither gradients nor losses, norms, or whether they are finite."""
    run = make_run(optax.adamw(0.01), stage, mesh, num_steps=3)
    assert not crossing(run)
    assert crossing(make_run(optax.adamw(0.01), stage, mesh))


def test_a_fragment_sends_its_own_bytes_in_four_bits():
    """Half a byte a number and a scale for 2048; fails if all fragments are sent."""
    settings = {"codec": "int4", "num_steps": 4, "num_fragments": 2}
    run = make_run(mesh=schema.Mesh(replica=2, tensor=4), **settings)
    for i, names in enumerate(FRAGMENTS[2]):
        grads = [run.state.extra.replicas.master[name] for name in names]
        sent = crossing(run, f"mean_{i}", grads, run.state.extra.errors[i])
        assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]
        assert {each.dtype for each in sent} == {"u8"}


def test_a_fragment_is_sent_once_a_round_and_merged_after_the_delay():
    run = make_run(**STREAMED)
    called, calls, state = note_programs(run), [], run.state
    for step in range(1, 9):
        state, _ = run.step(state, make_batch(step))
        calls += [(step, name) for name in called]
        called.clear()
    sent = [call for call in calls if call[1].startswith("mean")]
    merged = [call for call in calls if call[1].startswith("merge")]
    assert sent == [(1, "mean_0"), (3, "mean_1"), (5, "mean_0"), (7, "mean_1")]
    assert merged == [(2, "merge_0"), (4, "merge_1"), (6, "merge_0"), (8, "merge_1")]


def test_outer_steps_move_only_what_follows_gradients():
    """Fails if a codec moves frozen weights, or an outer momentum what counts move.

    Fails, too, if either of them counts in the norm of the gradient.
    """
    frozen = schema.ParamGroup(pattern="^head|few/w", learning_rate_scale=0.0)
    config = runs.make_config(
        0,
        mesh=schema.Mesh(replica=2),
        optimizer=schema.Optimizer(
            schedule=schema.Cosine(num_warmup_steps=0), groups=(frozen,)
        ),
        communication=with_rounds(codec="onebit", num_steps=2),
    )
    model = totals.make_model()
    tx = make_optimizer(config, model)
    run = make_planned_run(config, model, tx, devices=jax.devices()[:2])
    settings = config.optimizer, config.precision
    update = make_update(tx, run.plan, *settings, None, model.stack)
    with jax.set_mesh(run.mesh):
        ones = jax.tree.map(jnp.ones_like, run.state.master)
        counted = jax.tree.map(np.max, jax.jit(update.unscaled)(ones, jnp.float32(1)))
    expected = {"router": {"bias": 0}, "w": 1}
    few = {"router": {"bias": 0}, "w": 0}
    assert counted == {"embed": 1, "head": 0, "few": few, "many": expected}
    before, state = anchor_of(run.state), run.state
    biases = {name: before[name]["router"]["bias"] for name in totals.SEGMENTS}
    for number in range(4):
        batch = totals.make_batch(number)
        state, _ = run.step(state, batch)
        if number % 2 == 0:  # a round begins
            apart = [dict(biases) for _ in range(2)]
        for i, own in enumerate(apart):
            rows = {name: np.split(x, 2)[i] for name, x in batch.items()}
            for name, layers in own.items():
                own[name] = np.stack(
                    [
                        totals.moved_by_hand(b, totals.load_by_hand(b, rows))
                        for b in layers
                    ]
                )
        biases = {name: np.mean([own[name] for own in apart], 0) for name in biases}
    anchor, replicas = anchor_of(state), replicas_of(state)
    for after, copies in ((anchor, ()), (replicas, (2,))):
        for name, expected in biases.items():
            shape = copies + expected.shape
            bias = after[name]["router"]["bias"]
            np.testing.assert_allclose(
                bias, np.broadcast_to(expected, shape), rtol=0, atol=1e-6
            )
        for path in (("head",), ("few", "w")):
            start, end = before, after
            for key in path:
                start, end = start[key], end[key]
            np.testing.assert_array_equal(end, np.broadcast_to(start, end.shape))
    assert (anchor["many"]["w"] != before["many"]["w"]).all()
    assert anchor["embed"].shape == state.extra.momentum["embed"].shape
    assert state.extra.momentum["head"] is None


def test_more_fragments_than_arrays_are_refused():
    with pytest.raises(PlanError) as error:
        make_run(num_steps=8, num_fragments=4)
    expected = (
        "communication.local_steps.num_fragments=4 has fragments without any layer or "
    )
    assert str(error.value) == expected + "array; use at most 3"


@pytest.mark.parametrize(
    ("name", "codec"), [("muon", "int4"), ("muon", "int2"), ("adamw", "int4")]
)
def test_optimizers_of_the_settings_work_inside(name, codec):
    """MuLoCo: fragments in few bits, and what a replica learned counts half."""
    settings = with_rounds(codec=codec, **STREAMED)
    optimizer = rules.optimizer(name, num_warmup_steps=0, peak_learning_rate=0.01)
    config = runs.make_config(
        2,
        mesh=schema.Mesh(replica=4),
        optimizer=optimizer,
        communication=settings,
        num_steps=40,
    )
    model = models.make_mlp()
    run = make_planned_run(config, model, make_optimizer(config, model))
    batch, state = make_batch(0), run.state
    before = float(run.step.evaluate(state, batch)["loss"])
    for _ in range(40):
        state, _ = run.step(state, batch)
    assert float(run.step.evaluate(state, batch)["loss"]) < 0.9 * before
