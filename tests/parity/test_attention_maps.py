"""Attention of a student's layers follows the attention of a teacher's layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parity.test_hidden_states import batch_of
from tests.support.refusals import config_error
from tests.weights.test_growth import start_mixture
from tests.weights.test_pruning import LARGE, _config, save_run
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.models.block import layers_of
from zjax.settings import schema
from zjax.settings.distill import AttentionMaps
from zjax.settings.prune import Listed, Prune

KEPT = (1, 3)
SMALL = dataclasses.replace(LARGE, num_layers=2)
NARROW = dataclasses.replace(SMALL, num_heads=2, num_kv_heads=1, head_size=4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_run(LARGE, tmp_path_factory.mktemp("teacher"))[0]


def start(path, directory, model=SMALL, num_devices=1, **sections):
    maps = AttentionMaps(weight=2.0, fraction=0.002)
    distill = schema.Distill(teacher=path, fraction=0.003, attention=maps)
    prune = Prune(layers=Listed(numbers=KEPT)) if model is NARROW else None
    source = path if model is NARROW else ""
    given = {"distill": distill, "directory": str(directory), "prune": prune}
    config = _config(model, source, **given, **sections)
    data = dataclasses.replace(config.data, length=8)
    return start_mixture(dataclasses.replace(config, data=data), num_devices)


def heads_of(decoder, batch):
    """Queries and keys of each layer, by the layers themselves."""
    x, context = decoder.embedding(batch)
    graph, state = nnx.split(decoder.blocks)
    found = []
    for number in range(decoder.config.num_layers):
        block = nnx.merge(graph, jax.tree.map(lambda x, n=number: x[n], state))
        layer = layers_of(block)[0]

        def attend(q, k, v, _):
            found.append([np.asarray(y, np.float64) for y in (q, k)])
            return q, None

        layer.attention(layer.attention_norm(x), context.rotation, attend)
        x, _ = layer(x, context)
    return found


def maps_of(q, k, segments):
    """Attention weights [B, H, L, L] of each token on tokens before, one by one."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    maps = np.zeros((len(q), q.shape[2], q.shape[1], q.shape[1]))
    for row, head, token in np.ndindex(maps.shape[:3]):
        seen = [s for s in range(token + 1) if segments[row, s] == segments[row, token]]
        scores = k[row, seen, head] @ q[row, token, head] / np.sqrt(q.shape[3])
        powers = np.exp(scores - scores.max())
        maps[row, head, token, seen] = powers / powers.sum()
    return maps


def expected_divergence(run, large, batch, heads=slice(None)):
    segments = np.asarray(batch["segment_ids"])
    values = []
    followers = heads_of(run.bind(run.state), batch)
    followed = heads_of(large, batch)
    for place, layer in enumerate(KEPT):
        p = maps_of(*followed[layer], segments)
        p = p[:, heads if isinstance(heads, slice) else heads[place]]
        q = maps_of(*followers[place], segments)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(p > 0, p * np.log(p / q), 0).sum(-1).mean(1)
        values.append(each[segments > 0].mean())
    return np.mean(values)


def documents(step):
    """A batch of two documents, and padding at the end."""
    batch = batch_of(step)
    row = np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32)
    ids = np.broadcast_to(row, batch["tokens"].shape).copy()
    return batch | {"segment_ids": ids}


def test_divergences_are_what_numpy_computes_and_end_with_the_stage(teacher, tmp_path):
    """Fails if other layers, heads or tokens are compared, or other weights learn."""
    run = start(teacher, tmp_path)
    batch = jax.tree.map(jnp.asarray, documents(0))
    told: Any = run.step.inputs.teacher
    large = told._model.bind(told.params, {})
    expected = expected_divergence(run, large, batch)
    extended = run.step.inputs.extend(batch, 1).batch

    def divergence(params):
        return run.model.loss(params, {}, extended, None).metrics[
            "attention_divergence"
        ]

    slopes = jax.grad(divergence)(run.state.master)["blocks"]
    is_zero = {
        (name, part): not np.abs(slopes[name][part]["kernel"][1]).any()
        for name, part in [
            *[("attention", x) for x in ("query", "key", "value", "out")],
            ("mlp", "down"),
        ]
    }
    # Maps of the last layer read queries and keys alone of that layer.
    assert [*is_zero.values()] == [False, False, True, True, True]
    assert np.abs(slopes["attention"]["value"]["kernel"][0]).any()
    state, found = run.state, []
    for step in range(4):
        state, metrics = run.step(state, documents(step))
        found.append({name: float(x) for name, x in metrics.items()})
    first = found[0]
    assert expected > 0.01
    np.testing.assert_allclose(first["attention_divergence"], expected, rtol=1e-4)
    total = first["token_loss"] + first["teacher_divergence"] + 2 * expected
    np.testing.assert_allclose(first["loss"], total, rtol=1e-4)
    has = ["attention_divergence" in each for each in found]
    assert has == [True, True, False, False]


def test_heads_of_a_pruned_start_follow_their_copies_on_any_mesh(teacher, tmp_path):
    run = start(teacher, tmp_path / "one", NARROW)
    batch = jax.tree.map(jnp.asarray, documents(0))
    told: Any = run.step.inputs.teacher
    groups = told._targets.groups
    heads = [[2 * x[0], 2 * x[0] + 1] for x in groups]
    large = told._model.bind(told.params, {})
    expected = expected_divergence(run, large, batch, heads)
    sharded = schema.Zero(stage=3, min_shard_elements=8)
    given = {"zero": sharded, "num_microbatches": 2}
    many = start(teacher, tmp_path / "many", NARROW, 2, **given)
    _, metrics = many.step(many.state, documents(0))
    np.testing.assert_allclose(metrics["attention_divergence"], expected, rtol=1e-4)


REMEDY = "leave it out, or set distill.attention to None"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"distill.attention.fraction": 0.8},
            "distill.attention.fraction=0.8 ends after the stage of "
            "distill.fraction=0.7; use at most 0.7",
        ),
        (
            {"distill.attention.weight": 2.0, "model.mlp_tiles": 2},
            "model.mlp_tiles=2 splits the layers that distill.attention compares; "
            f"{REMEDY}",
        ),
        (
            {"distill.attention.weight": 2.0, "mesh.sequence": 2},
            "mesh.sequence=2 changes the attention that distill.attention compares; "
            f"{REMEDY}",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(settings, text):
    with config_error(text):
        check_config(load_config(settings | {"distill.teacher": "runs/large"}), 2)


def test_other_heads_without_a_pruned_start_are_refused(teacher, tmp_path):
    model = dataclasses.replace(SMALL, num_heads=2, head_size=4)
    with config_error(
        f"distill.teacher={teacher!r} has 4 heads, and the model 2: distill.attention "
        "compares equal heads; start from the teacher by prune, or set "
        "distill.attention to None"
    ):
        start(teacher, tmp_path, model)
