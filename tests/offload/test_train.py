"""Steps whose optimizer state rests on the host: the same numbers, another memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import zjax
from tests.support import language
from zjax.config import schema
from zjax.errors import ConfigError, PlanError
from zjax.initialize import make_run
from zjax.models.build import make_model
from zjax.offload import segments
from zjax.offload import train as offload
from zjax.optim.build import make_optimizer
from zjax.sharding import plan as plans

ROWS, LENGTH, STEPS = 16, 8, 4
GPT = dataclasses.replace(language.GPT, remat="full", num_layers=3)
LLAMA = dataclasses.replace(language.LLAMA, remat="full")
BERT = dataclasses.replace(language.BERT, remat="full")


@pytest.fixture(autouse=True)
def _small_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)


def make_config(memory, stage=2, *, num_microbatches=1, model=GPT, **sections):
    precision = sections.pop("precision", {})
    optimizer = sections.pop("optimizer", {})
    zero = schema.Zero(
        stage=stage,
        min_shard_elements=0,
        optimizer_memory=memory,
        **sections.pop("zero", {}),
    )
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        model=model,
        data=schema.Data(length=LENGTH, source="synthetic"),
        zero=zero if stage else dataclasses.replace(zero, min_shard_elements=16_384),
        precision=schema.Precision(**{"compute_dtype": "float32"} | precision),
        optimizer=schema.Optimizer(**{"num_warmup_steps": 1} | optimizer),
    )


def make_batch(step, vocab_size=29):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = rng.uniform(0.5, 1, (ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def start(config, tx=None):
    model = make_model(config)
    if tx is None:
        return make_run(config, model, make_optimizer(config, model))
    return make_run(config, model, zjax.adopt_optimizer(tx, model, config))


def train(run, steps=STEPS):
    state, found = run.state, []
    for step in range(steps):
        state, metrics = run.step(state, make_batch(step))
        found.append({name: float(x) for name, x in metrics.items()})
    return state, found


def weights_of(state):
    """Master weights by path, stacked as without offload."""
    return jax.tree.map(np.asarray, zjax.sharding.layers.put_together(state.master))


def assert_same_run(config, *, rtol=1e-5, **changes):
    """Fails if streaming changes what a step computes."""
    zero = dataclasses.replace(
        config.zero,
        optimizer_memory="device",
        gradient_memory="device",
        parameter_memory="device",
    )
    expected = train(start(dataclasses.replace(config, zero=zero), **changes))
    found = train(start(config, **changes))
    for x, y in zip(found[1], expected[1], strict=True):
        assert x.keys() == y.keys()
        np.testing.assert_allclose([*x.values()], [y[n] for n in x], rtol, 1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6),
        weights_of(found[0]),
        weights_of(expected[0]),
    )


CASES = {
    "stage 0": {"stage": 0},
    "stage 1, two microbatches": {"stage": 1, "num_microbatches": 2},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, two microbatches": {"stage": 3, "num_microbatches": 2},
    "untied, rotary": {"model": LLAMA, "stage": 3},
    "encoder": {"model": BERT},
    "no clipping, under the backward pass": {
        "optimizer": {"clip_norm": math.inf},
        "precision": {"on_nonfinite": "update"},
    },
    "lamb": {"optimizer": {"name": "lamb"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "muon": {"optimizer": {"name": "muon"}},
    "averaged weights": {"optimizer": {"ema_decay": 0.9}},
    "parameters on the host": {"zero": {"parameter_memory": "pinned_host"}},
    "parameters on the host, stage 3, two microbatches": {
        "zero": {"parameter_memory": "pinned_host"},
        "stage": 3,
        "num_microbatches": 2,
        "model": LLAMA,
    },
    "parameters on the host, under the backward pass": {
        "zero": {"parameter_memory": "pinned_host"},
        "optimizer": {"clip_norm": math.inf},
        "precision": {"on_nonfinite": "update"},
    },
    "inputs of blocks on the host": {
        "model": dataclasses.replace(GPT, activation_memory="pinned_host"),
        "num_microbatches": 2,
    },
    "gradients on the host": {"zero": {"gradient_memory": "pinned_host"}},
    "frozen and scaled groups": {
        "optimizer": {
            "groups": (
                schema.ParamGroup(pattern="^embedding", learning_rate_scale=0.0),
                schema.ParamGroup(pattern="query/kernel$", learning_rate_scale=3.0),
            )
        }
    },
}


@pytest.mark.parametrize("case", CASES)
def test_trajectory_is_that_of_a_run_without_offload(case):
    assert_same_run(make_config("pinned_host", **CASES[case]))


def test_optimizers_of_the_users_see_layers_as_without_offload():
    """Fails if a norm per array is taken over a stack, or clipping per group."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    config = make_config("pinned_host", optimizer={"clip_norm": math.inf})
    assert_same_run(config, tx=tx)


@pytest.mark.parametrize("waits", [True, False])
def test_updates_wait_for_the_norm_only_where_they_read_it(waits):
    """Fails if an update without clipping waits for all gradients, or one with it
    does not."""
    changes = {} if waits else CASES["no clipping, under the backward pass"]
    run = start(make_config("pinned_host", **changes))
    assert run.step.programs["train"].update.waits is waits


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.nbytes >= 512}


def test_state_rests_on_the_host_and_parameters_on_the_device():
    """Fails if `zero.optimizer_memory` does nothing."""
    run = start(make_config("pinned_host"))
    state, _ = train(run, 1)
    for each in (start(make_config("pinned_host")).state, state):
        assert memories((each.master, each.opt_state)) == {"pinned_host"}
        assert memories(each.params) == {"device"}
    on_device = start(make_config("device")).state
    assert memories((on_device.master, on_device.opt_state)) == {"device"}
    assert on_device.params == ()


def watch(monkeypatch, stream, limit):
    """Records what is in flight whenever a load is brought up."""
    seen, bring = [], stream._bring
    monkeypatch.setattr(stream, "limit", int(limit))
    monkeypatch.setattr(
        stream, "_bring", lambda: (bring(), seen.append(stream.in_flight))
    )
    return seen


@pytest.mark.parametrize("bound", [1 << 30, 256])
def test_groups_come_one_after_another(monkeypatch, bound):
    """Fails if the whole state is on the devices at once, or groups are not cut."""
    monkeypatch.setattr(offload, "GROUP_BYTES", bound)
    config = make_config("pinned_host", model=dataclasses.replace(GPT, num_layers=6))
    run = start(config)
    step = run.step.programs["train"]
    moved = [r for r in step.rows if r.memory == "pinned_host"]
    total = sum(row.device_bytes for row in moved)
    seen = watch(monkeypatch, step.stream, total // 4)
    train(run, 2)
    assert len(seen) == 2 * step.update.num_groups
    assert (step.update.num_groups == 8) == (bound > 256)
    assert 0 < max(seen) <= total / 4


def test_gradients_wait_on_the_host(monkeypatch):
    """Fails if `zero.gradient_memory` does nothing: where the norm is waited for,
    gradients of groups that have not come up leave the devices."""
    on_device = make_config("pinned_host")
    zero = dataclasses.replace(on_device.zero, gradient_memory="pinned_host")
    on_host = dataclasses.replace(on_device, zero=zero)
    found = {}
    for config in (on_device, on_host):
        run = start(config)
        stream = run.step.programs["train"].stream
        watch(monkeypatch, stream, 1)
        resting, add = [], stream.add

        def watched(name, arrays, rows, add=add, stream=stream, resting=resting):
            add(name, arrays, rows)
            load = [x for x in stream.waiting if x.name == name]
            resting.extend(y for x in load for y in x.arrays[-len(arrays) :])

        monkeypatch.setattr(stream, "add", watched)
        _, metrics = train(run)
        found[config.zero.gradient_memory] = memories(resting), metrics
    assert found["pinned_host"][0] == {"pinned_host"}
    assert found["device"][0] == {"device"}
    assert found["pinned_host"][1] == found["device"][1]


def test_equal_blocks_are_compiled_once():
    run = start(
        make_config("pinned_host", model=dataclasses.replace(GPT, num_layers=6))
    )
    update = run.step.programs["train"].update
    blocks = {id(part.run) for part in update.updates[:6]}
    assert len(blocks) == 1


def test_blocks_rest_on_the_host():
    """Fails if `zero.parameter_memory` does nothing."""
    config = make_config("pinned_host", zero={"parameter_memory": "pinned_host"})
    run = start(config)
    state, _ = train(run, 1)
    assert memories(state.params["blocks"]) == {"pinned_host"}
    assert memories(state.params["embedding"]) == {"device"}


@pytest.mark.parametrize("num_layers", [4, 12])
def test_a_few_blocks_are_on_the_devices_whatever_the_depth(monkeypatch, num_layers):
    """Fails if blocks stay after their use, or come up without bound."""
    monkeypatch.setattr(segments, "AHEAD_BYTES", 0)
    model = dataclasses.replace(GPT, num_layers=num_layers)
    config = make_config(
        "pinned_host", model=model, zero={"parameter_memory": "pinned_host"}
    )
    run = start(config)
    stream = run.step.programs["train"].backward.stream
    block_bytes = sum(row.device_bytes for row in _moved(run.step.programs["train"]))
    seen = watch(monkeypatch, stream, stream.limit)
    state, _ = train(run, 1)
    assert max(seen) == 2 * block_bytes
    assert len(seen) == 2 * num_layers
    run.step.evaluate(state, make_batch(0))
    assert len(seen) == 3 * num_layers


def _moved(step):
    return [row for row in step.backward.block_rows if row.memory == "pinned_host"]


def test_memories_that_would_hold_nothing(monkeypatch):
    config = make_config("pinned_host", zero={"parameter_memory": "pinned_host"})
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1 << 18)
    with pytest.raises(PlanError) as error:
        start(config)
    assert str(error.value) == (
        "zero.optimizer_memory='pinned_host' moves nothing: no array has 262,144 bytes "
        "on a device; use device"
    )


def test_blocks_of_models_without_blocks_cannot_rest_on_the_host():
    settings = {
        "zero": {
            "min_shard_elements": 0,
            "optimizer_memory": "pinned_host",
            "parameter_memory": "pinned_host",
        }
    }
    batch = {"x": np.ones((8, 24), np.float32)}
    with pytest.raises(PlanError) as error:
        zjax.initialize(
            Perceptron(),
            optax.adam(1e-2),
            lambda m, b, _: m(b["x"]).mean(),
            batch,
            settings,
        )
    assert str(error.value) == (
        "zero.parameter_memory='pinned_host' moves nothing: the model has no blocks of "
        "such a size that run one by one; use device"
    )


def test_inputs_of_blocks_wait_on_the_host(monkeypatch):
    """Fails if `model.activation_memory` does nothing."""
    found = {}
    for memory in ("device", "pinned_host"):
        model = dataclasses.replace(GPT, activation_memory=memory)
        run = start(make_config("pinned_host", model=model))
        backward, away = run.step.programs["train"].backward, []
        put_away = backward.put_away
        monkeypatch.setattr(
            backward, "put_away", lambda x, f=put_away, a=away: a.append(f(x)) or a[-1]
        )
        train(run, 1)
        found[memory] = {row.memory for _, rows in away for row in rows}
        assert len(away) == GPT.num_layers
    assert found == {"device": {"device"}, "pinned_host": {"pinned_host"}}


def test_evaluation_and_generation_use_the_parameters_in_use():
    configs = [
        make_config("device"),
        make_config("pinned_host"),
        make_config("pinned_host", zero={"parameter_memory": "pinned_host"}),
    ]
    losses, scores = [], []
    for config in configs:
        run = start(config)
        state, _ = train(run, 2)
        losses.append(float(run.step.evaluate(state, make_batch(9))["loss"]))
        scores.append(np.asarray(run.bind(state)(jnp.ones((1, 4), jnp.int32))))
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-5)
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-4, atol=1e-5)


class Perceptron(linen.Module):
    """A user's model, which is no line of blocks."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(32)(x)))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_any_model_can_be_offloaded(num_microbatches):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 24)), "y": rng.normal(size=(16, 1))}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    found = []
    for memory in ("device", "pinned_host"):
        zero = {"stage": 2, "min_shard_elements": 0, "optimizer_memory": memory}
        settings = {
            "zero": zero,
            "precision": {"compute_dtype": "float32"},
            "num_microbatches": num_microbatches,
        }
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
        run = zjax.initialize(Perceptron(), tx, loss_fn, batch, settings)
        state = run.state
        for _ in range(STEPS):
            state, metrics = run.step(state, batch)
        found.append((float(metrics["loss"]), weights_of(state)))
    assert memories(state.master) <= {"pinned_host"}
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        found[0][1],
        found[1][1],
    )


def test_optimizer_that_reads_the_loss_again_is_refused():
    config = make_config("pinned_host", optimizer={"clip_norm": math.inf})
    with pytest.raises(PlanError) as error:
        start(config, optax.lbfgs(1e-2))
    assert "evaluates the loss within its update" in str(error.value) or (
        "cannot run group by group" in str(error.value)
    )


def test_settings_that_offload_cannot_use():
    model = dataclasses.replace(GPT, remat="dots", layers_per_scan=1)
    config = make_config(
        "pinned_host",
        model=model,
        precision={"compute_dtype": "bfloat16", "reduce_dtype": "float32"},
    )
    with pytest.raises(ConfigError) as error:
        zjax.config.check.check_config(config, 8)
    assert str(error.value) == (
        "precision.reduce_dtype='float32' is not built for "
        "zero.optimizer_memory='pinned_host'; use 'compute', or keep the state on the "
        "devices\n"
        "model.layers_per_scan=1 has no effect with "
        "zero.optimizer_memory='pinned_host', which runs blocks one by one; use 0\n"
        "model.remat='dots' has no effect with zero.optimizer_memory='pinned_host', "
        "which runs blocks of which only the inputs are kept; use full"
    )
