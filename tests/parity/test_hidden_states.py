"""Layers of a pruned student follow the streams of the layers they are copies of."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import offload
from tests.support.refusals import config_error
from tests.weights.test_growth import start_mixture
from tests.weights.test_pruning import LARGE, _config, save_run
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.models.block import layers_of
from zjax.run import pruned_start
from zjax.run.teacher_states import targets_of
from zjax.run.trainer import Trainer
from zjax.settings import schema
from zjax.settings.distill import HiddenStates
from zjax.settings.prune import Listed, Prune
from zjax.settings.quantize import Quantize, Rule

KEPT = (1, 3)
SMALL = dataclasses.replace(LARGE, num_layers=2, embed_size=12, head_size=4)
HIDDEN = HiddenStates(weight=2.0, fraction=0.002)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_run(LARGE, tmp_path_factory.mktemp("teacher"))[0]


def start(path, directory, num_devices=1, **sections):
    distill = schema.Distill(teacher=path, fraction=0.003, hidden=HIDDEN)
    config = _config(
        SMALL,
        path,
        prune=Prune(layers=Listed(numbers=KEPT)),
        distill=distill,
        directory=str(directory),
        **sections,
    )
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, length=8)
    )
    return start_mixture(config, num_devices)


def batch_of(step):
    batch = offload.make_batch(step)
    # Distances of microbatches are averaged by weight, as all losses of blocks are.
    return batch | {"weights": np.ones_like(batch["weights"])}


def streams_of(decoder, tokens):
    """The stream behind each layer, by the layers themselves."""
    x, context = decoder.embedding({"tokens": tokens})
    graph, state = nnx.split(decoder.blocks)
    found = []
    for number in range(decoder.config.num_layers):
        block = nnx.merge(graph, jax.tree.map(lambda x, n=number: x[n], state))
        x, _ = layers_of(block)[0](x, context)
        found.append(np.asarray(x, np.float64))
    return found


def test_distances_are_what_numpy_computes_and_end_with_the_stage(teacher, tmp_path):
    """Fails if the loss lacks distances, or layers follow others than their copies."""
    run = start(teacher, tmp_path)
    tokens = jnp.asarray(batch_of(0)["tokens"])
    told: Any = run.step.inputs.teacher
    targets = targets_of(run.config, LARGE, teacher)
    assert targets.blocks == KEPT
    large = told._model.bind(told.params, {})
    channels = np.asarray(targets.channels)
    followed = streams_of(large, tokens)
    expected = []
    followers = streams_of(run.bind(run.state), tokens)
    for place, layer in enumerate(KEPT):
        target = followed[layer][..., channels]
        error = np.square(followers[place] - target).sum(-1)
        expected.append((error / np.square(target).sum(-1)).mean())
    state, found = run.state, []
    for step in range(4):
        state, metrics = run.step(state, batch_of(step))
        found.append({name: float(x) for name, x in metrics.items()})
    first = found[0]
    np.testing.assert_allclose(first["hidden_distance"], np.mean(expected), rtol=1e-4)
    total = first["token_loss"] + first["teacher_divergence"] + 2 * np.mean(expected)
    np.testing.assert_allclose(first["loss"], total, rtol=1e-4)
    names = "hidden_distance", "teacher_divergence"
    has = [[name in each for name in names] for each in found]
    assert has == [[True, True], [True, True], [False, True], [False, False]]


def test_sharded_microbatches_equal_one_device(teacher, tmp_path):
    one = start(teacher, tmp_path / "one")
    sharded = schema.Zero(stage=3, min_shard_elements=8)
    many = start(teacher, tmp_path / "many", 4, zero=sharded, num_microbatches=2)
    ends = []
    for run in (one, many):
        state, _ = run.step(run.state, batch_of(0))
        # The second loss tells whether the updates are equal.
        _, metrics = run.step(state, batch_of(1))
        ends.append([float(metrics[n]) for n in ("loss", "hidden_distance")])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("student", "numbers"),
    [(2, (1, 3)), (3, (1, 2, 3)), (4, (0, 1, 2, 3)), (8, (0, 0, 1, 1, 2, 2, 3, 3))],
)
def test_layers_follow_evenly_spaced_ones_without_a_pruned_start(student, numbers):
    model = dataclasses.replace(LARGE, num_layers=student)
    found = targets_of(schema.Config(model=model), LARGE, "runs/large")
    assert (found.blocks, found.channels) == (numbers, None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"distill.hidden.fraction": 0.8},
            "distill.hidden.fraction=0.8 ends after the stage of distill.fraction=0.7; "
            "use at most 0.7",
        ),
        (
            {"distill.hidden.fraction": 0.0},
            "distill.hidden.fraction=0.0 is no step of num_steps=1000; use more",
        ),
        (
            {"distill.hidden.weight": 2.0, "model.mlp_tiles": 2},
            "model.mlp_tiles=2 splits the layers that distill.hidden compares; leave "
            "it out, or set distill.hidden to None",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(settings, text):
    with config_error(text):
        check_config(load_config(settings | {"distill.teacher": "runs/large"}), 1)


def test_narrower_layers_without_a_pruned_start_are_refused(teacher, tmp_path):
    with config_error(
        f"distill.teacher={teacher!r} has 16 channels, and the model 12: "
        "distill.hidden compares equal channels; start from the teacher by prune, or "
        "set distill.hidden to None"
    ):
        distill = schema.Distill(teacher=teacher, hidden=HIDDEN)
        config = _config(SMALL, "", distill=distill, directory=str(tmp_path))
        start_mixture(config)


def test_a_pruned_student_with_rounded_weights_resumes(teacher, tmp_path, monkeypatch):
    """Fails if a resumed run measures again, or learns from other layers."""

    def trainer(directory, num_steps):
        model = dataclasses.replace(SMALL, max_length=16)
        config = _config(
            model,
            teacher,
            num_steps=8,
            prune=Prune(),
            distill=schema.Distill(teacher=teacher, hidden=HiddenStates()),
            quantize=Quantize(rules=(Rule(weights="int8", group_size=4),)),
            directory=str(tmp_path / directory),
            evaluation=schema.Evaluation(num_batches=0),
            observe=schema.Observe(sinks=(), plot=False),
        )
        data = dataclasses.replace(config.data, length=8)
        config = dataclasses.replace(config, data=data, global_batch_size=2)
        made = Trainer(config, devices=jax.devices()[:1])
        made.config = dataclasses.replace(made.config, num_steps=num_steps)
        return made

    whole = trainer("whole", 4).fit()
    trainer("parts", 2).fit()
    monkeypatch.setattr(pruned_start, "measure", None)
    parts = trainer("parts", 4).fit()
    jax.tree.map(np.testing.assert_array_equal, parts.master, whole.master)
