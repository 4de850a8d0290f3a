"""A student learns from a teacher on any placement as plain JAX says it does."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import zjax
from tests.checkpoint import states
from tests.support import language, offload
from tests.support.runs import make_small_run
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, ConfigError
from zjax.models.build import make_model
from zjax.ops import cross_entropy
from zjax.ops.divergence import FORWARD, REVERSE
from zjax.run.build import make_run
from zjax.run.saving import restore, save
from zjax.settings import distill as settings
from zjax.settings import schema
from zjax.settings.mappings import to_mapping
from zjax.settings.quantize import Quantize, Rule
from zjax.sharding import plan as plans
from zjax.weights.source import name_leaves

MOE = schema.TokenChoice(num_experts=4, top_k=2, first_dense=2, residual=True)
TEACHER = dataclasses.replace(offload.THREE, moe=MOE)
STUDENT = offload.GPT
"""It has a layer less."""
CHOICE = schema.ExpertChoice(num_experts=2)
EXPERTS = schema.TokenChoice(num_experts=2, top_k=2, balance_scope="sequence")
MIXTURE = dataclasses.replace(offload.GPT, moe=EXPERTS)
"""A student whose balance losses do not depend on the mesh."""
STAGE, WEIGHT, TEMPERATURE, RATE = 2, 0.5, 2.0, 0.5


def make_batch(step):
    batch = offload.make_batch(step)
    return batch | {"weights": np.ones_like(batch["weights"])}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with large weights, and the decoder with the same."""
    decoder = language.make_language_model(TEACHER)
    folder = tmp_path_factory.mktemp("teacher")
    weights = name_leaves(language.params_of(decoder))
    tensors = {n.replace("/", "."): np.asarray(x) for n, x in weights.items()}
    safetensors.numpy.save_file(tensors, folder / "w.safetensors")
    source = schema.Checkpoint(init_from=str(folder / "w.safetensors"))
    config = offload.make_config("device", 0, model=TEACHER, checkpoint=source)
    run = offload.start(config, devices=jax.devices()[:1])
    save(folder / "checkpoints", run.state, run)
    return str(folder), decoder


def make_config(
    path="", stage=0, memory: Any = "device", *, state="device", learns=None, **more
):
    distill = None
    if path:
        distill = schema.Distill(
            teacher=path,
            weight=WEIGHT,
            temperature=TEMPERATURE,
            fraction=0.1,
            memory=memory,
            **learns or {},
        )
    model = more.pop("model", STUDENT)
    more["optimizer"] = {"clip_norm": math.inf}
    return offload.make_config(state, stage, model=model, distill=distill, **more)


def start(config, num_devices=1):
    return offload.start(config, optax.sgd(RATE), jax.devices()[:num_devices])


def teacher_of(run) -> Any:
    return run.step.inputs.teacher


def train(run, steps=STAGE, state=None):
    state, found = run.state if state is None else state, []
    for _ in range(steps):
        state, metrics = run.step(state, make_batch(int(state.step)))
        found.append({n: float(x) for n, x in metrics.items() if n != "load"})
    return state, found


@functools.cache
def alone(path, decoder, model=STUDENT):
    """Losses and weights of the first steps on one device, by plain JAX."""
    run = start(make_config(model=model))

    def loss_of(params, batch):
        plain = run.model.loss(params, {}, batch, None)
        student = run.model.bind(params, {})(batch["tokens"])
        own = jax.nn.log_softmax(student / TEMPERATURE)
        target = jax.nn.log_softmax(decoder(batch["tokens"]) / TEMPERATURE)
        kl = jnp.mean(jnp.sum(jnp.exp(target) * (target - own), -1))
        divergence = TEMPERATURE**2 * kl
        tokens = plain.value - plain.metrics.get("auxiliary_loss", 0)
        found = {"teacher_divergence": divergence, "token_loss": tokens}
        return plain.value + WEIGHT * divergence, found

    differentiate = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    params, losses = run.state.master, []
    for step in range(STAGE):
        batch = jax.tree.map(jnp.asarray, make_batch(step))
        (loss, found), grads = differentiate(params, batch)
        params = jax.tree.map(lambda x, grad: x - RATE * grad, params, grads)
        losses.append({"loss": loss, **found})
    return losses, jax.tree.map(np.asarray, params)


SHARDED = {"mesh": schema.Mesh(expert=2), "memory": "pinned_host"}


@pytest.mark.parametrize(
    ("num_devices", "settings"),
    [
        pytest.param(
            4,
            {"stage": 3, "num_microbatches": 2, **SHARDED},
            id="stage-3-teacher-on-the-host-accumulation",
        ),
        pytest.param(
            1,
            {
                "stage": 1,
                "state": "pinned_host",
                "zero": {"parameter_memory": "pinned_host"},
            },
            id="blocks-on-the-host",
        ),
        pytest.param(
            2,
            {"mesh": schema.Mesh(pipeline=2), "num_microbatches": 2, "model": MIXTURE},
            id="pipeline-of-experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_and_updates_equal_plain_jax(
    num_devices, settings, teacher, monkeypatch
):
    """Fails if the teacher has a gradient, other rows, or another weight."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)
    path, decoder = teacher
    losses, params = alone(path, decoder, settings.get("model", STUDENT))
    run = start(make_config(path, **settings), num_devices)
    state, found = train(run)
    for one, other in zip(found, losses, strict=True):
        for name, x in other.items():
            np.testing.assert_allclose(one[name], x, rtol=3e-5, err_msg=name)

    def compare(x, expected):
        shape = tuple(map(slice, expected.shape))
        np.testing.assert_allclose(x[shape], expected, rtol=2e-4, atol=2e-6)

    jax.tree.map(compare, offload.weights_of(state), params)
    if "memory" in settings:
        assert_rests(teacher_of(run).params, settings["memory"], decoder)


def assert_rests(found, memory, decoder):
    """Fails if a teacher is elsewhere than asked, whole on each device, or changed."""
    assert {x.sharding.memory_kind for x in jax.tree.leaves(found)} == {memory}
    weights = language.params_of(decoder)
    for keys, x in jax.tree_util.tree_leaves_with_path(weights):
        stored = functools.reduce(lambda node, key: node[key.key], keys, found)
        whole = np.asarray(stored)[tuple(map(slice, x.shape))]
        np.testing.assert_array_equal(whole, x)
    kernel = found["blocks"]["segment1"]["mlp"]["experts"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.nbytes < kernel.nbytes


def oracle(divergence, p, q):
    """Divergences of probabilities of teacher and student, in float64."""
    beta = getattr(divergence, "beta", 0.5)
    m = beta * p + (1 - beta) * q
    if isinstance(divergence, settings.ReverseKl):
        return np.sum(q * np.log(q / p), -1)
    to_teacher, to_student = (np.sum(x * np.log(x / m), -1) for x in (p, q))
    return beta * to_teacher + (1 - beta) * to_student


@pytest.mark.parametrize(
    "divergence", [settings.ReverseKl(), settings.JensenShannon(beta=0.3)]
)
def test_other_divergences_are_what_numpy_computes(divergence, teacher):
    """Fails if the setting changes nothing, or is of the student from the teacher."""
    path, decoder = teacher
    run = start(make_config(path, learns={"divergence": divergence}))
    batch = jax.tree.map(jnp.asarray, make_batch(0))
    batch = teacher_of(run).teach(batch)

    found = jax.jit(run.model.loss)(run.state.master, {}, batch, None)
    student = run.model.bind(run.state.master, {})
    logits = [x(batch["tokens"]) for x in (decoder, student)]
    p, q = (np.exp(np.asarray(x, np.float64) / TEMPERATURE) for x in logits)
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    expected = TEMPERATURE**2 * oracle(divergence, p, q).mean()
    np.testing.assert_allclose(found.metrics["teacher_divergence"], expected, rtol=1e-4)


@pytest.mark.parametrize("beta", [FORWARD, 0.3, REVERSE])
def test_gradients_of_divergences_are_finite_differences(beta):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    head, along = draw(5, 4), draw(1, 3, 4)
    teacher = cross_entropy.Teacher(draw(1, 3, 4), draw(5, 4), draw(), jnp.float32(2))
    targets = jnp.zeros((1, 3), int)

    @jax.jit
    @jax.value_and_grad
    def loss_of(hidden):
        given = {"teacher": teacher, "divergence": beta}
        weights = jnp.ones(targets.shape)
        return cross_entropy.token_loss(
            hidden, head, targets, weights, **given
        ).loss_sum

    hidden = draw(1, 3, 4)
    _, gradient = loss_of(hidden)
    ahead, behind = (loss_of(hidden + x * along)[0] for x in (1e-2, -1e-2))
    slope = float(jnp.vdot(gradient, along))
    np.testing.assert_allclose((ahead - behind) / 2e-2, slope, rtol=2e-3)


def test_after_the_stage_a_run_is_one_without_teacher(teacher, tmp_path):
    """Bit for bit, in one go and from a checkpoint in either stage."""
    path, _ = teacher
    run, plain = start(make_config(path)), start(make_config())
    state, _ = train(run, 1)
    save(tmp_path, state, run)
    state, found = train(run, STAGE - 1, state)
    assert "teacher_divergence" in found[0]
    save(tmp_path, state, run)
    names = Store(str(tmp_path)).source().entries
    assert names == Store(str(tmp_path)).source(1).entries
    state, found = train(run, 2, state)
    assert "teacher_divergence" not in found[0]
    assert teacher_of(run)._params is None
    ends = [offload.weights_of(state)]
    cases = (plain.config, STAGE, 2), (run.config, STAGE, 2), (run.config, 1, 3)
    for config, step, steps in cases:
        again = start(config)
        state, _ = restore(tmp_path, again, step=step)
        ends.append(offload.weights_of(train(again, steps, state)[0]))
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_array_equal, end, ends[0])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(
            {"vocab_size": 31},
            "has 29 tokens, and the model 31; use a teacher of the same vocabulary",
            id="vocabulary",
        ),
        pytest.param(
            {"max_length": 32},
            "reads 16 tokens, and data.length=32; use a teacher of longer sequences",
            id="length",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(model, text, teacher):
    path, _ = teacher
    config = make_config(path, model=dataclasses.replace(STUDENT, **model))
    if "max_length" in model:
        data = dataclasses.replace(config.data, length=32)
        config = dataclasses.replace(config, data=data)
    with pytest.raises(ConfigError) as error:
        start(config)
    assert str(error.value) == f"distill.teacher={path!r} {text}"


def test_a_loss_that_reads_no_divergence_is_refused(teacher):
    config = make_config(teacher[0], learns={"divergence": settings.ReverseKl()})
    model = dataclasses.replace(make_model(config), bind=lambda params, state: params)
    tx = zjax.adopt_optimizer(optax.sgd(RATE), model, config)
    with pytest.raises(ConfigError) as error:
        make_run(config, model, tx, devices=jax.devices()[:1])
    assert str(error.value) == (
        "distill.divergence='reverse_kl' is not read by the loss of a model that zjax "
        "has not made; use 'forward_kl' and compute it in the loss, or a built-in model"
    )


def test_a_teacher_of_rounded_matrices_teaches_with_them(tmp_path):
    """Fails if the master weights of the teacher teach."""
    rules = Quantize(rules=(Rule(weights="int4", group_size=4),))
    config = offload.make_config("device", 0, model=STUDENT, quantize=rules)
    run = offload.start(config, devices=jax.devices()[:1])
    save(tmp_path / "checkpoints", run.state, run)
    batch = jax.tree.map(jnp.asarray, make_batch(0))
    told = teacher_of(start(make_config(str(tmp_path)))).teach(batch)["teacher"]
    found = np.einsum("blm,vm->blv", told["hidden"], told["head"])
    weights = run.state.master
    rounded = run.model.bind(weights, {})(batch["tokens"])
    np.testing.assert_allclose(found, rounded, atol=1e-5)
    plain = make_model(dataclasses.replace(config, quantize=None))
    exact = plain.bind(weights, {})(batch["tokens"])
    assert np.abs(found - exact).max() > 1e-2 * np.abs(exact).max()


def save_settings(directory, model=STUDENT):
    """A checkpoint whose arrays are never read."""
    state = {"step": np.zeros((), np.int32)}
    rows, store = states.make_rows(state), Store(str(directory))
    extra = {"config": to_mapping(offload.make_config("device", model=model))}
    store.save(1, states.place(state, rows), rows, extra=extra)
    store.close()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(offload.BERT, "is an encoder; use a decoder", id="encoder"),
        pytest.param(
            dataclasses.replace(STUDENT, moe=CHOICE),
            "has model.moe='expert_choice', and sees later tokens; use a teacher "
            "whose tokens choose",
            id="expert-choice",
        ),
    ],
)
def test_models_that_cannot_teach_are_refused(model, text, tmp_path):
    save_settings(tmp_path, model)
    with pytest.raises(ConfigError) as error:
        start(make_config(str(tmp_path)))
    assert str(error.value) == f"distill.teacher='{tmp_path}' {text}"


def test_a_model_that_reads_no_teacher_is_refused(tmp_path):
    save_settings(tmp_path)
    distill = schema.Distill(teacher=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        make_small_run(optax.sgd(RATE), num_devices=1, distill=distill)
    assert str(error.value) == (
        f"distill.teacher='{tmp_path}' has no effect on a model whose entries lack "
        "'teacher/hidden'; use a built-in model, or read batch['teacher'] in the loss"
    )


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError) as error:
        start(make_config(str(tmp_path)))
    assert str(error.value) == (
        f"distill.teacher='{tmp_path}' holds no checkpoint; give the directory of a run"
    )
