"""ZeRO++ on two nodes of four devices: steps, bytes between nodes, and codes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.errors import PlanError
from zjax.observe.collectives import bytes_leaving_node, list_collectives
from zjax.settings import schema
from zjax.sharding import memory
from zjax.sharding.describe import describe_plan
from zjax.typing import Model

WIDTH, HIDDEN = 64, 512
MATRIX = WIDTH * HIDDEN
"""Elements; an eighth is two blocks of the codecs."""
HPZ, QWZ, QGZ = "secondary_partition", "quantized_weights", "quantized_gradients"
ALL = (HPZ, QWZ, QGZ)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(models, "WIDTH", WIDTH)
    monkeypatch.setattr(models, "HIDDEN", HIDDEN)


def sharded(features):
    """Section `zero.replicas` with some features."""
    features: dict[str, Any] = dict.fromkeys(features, True)
    return schema.Sharded(**features)


def make_run(*features, num_microbatches=1, dtype: Any = "float32", model=None, **zero):
    zero = {"replicas": sharded(features), **zero}
    return runs.make_small_run(
        optax.adam(1e-3),
        model=model or separable_model(),
        mesh=schema.Mesh(replica=2, data=4),
        zero=schema.Zero(stage=3, min_shard_elements=0, **zero),
        num_microbatches=num_microbatches,
        precision=schema.Precision(compute_dtype=dtype),
    )


def separable_model() -> Model:
    """The network behind a scale, so that both matrices are read in both passes."""
    inner = models.make_mlp()

    def loss(params, model_state, batch, key):
        scaled = batch | {"x": batch["x"] * params["scale"][None]}
        return inner.loss(params, model_state, scaled, key)

    def init(key):
        params, model_state = inner.init(key)
        return params | {"scale": jnp.ones(WIDTH)}, model_state

    def logical(params):
        return inner.logical(params) | {"scale": (None,)}

    changes = {"init": init, "loss": loss, "logical": logical}
    return dataclasses.replace(inner, separable=True, **changes)


def trained(run, num_steps=3):
    losses, state = runs.train(run, num_steps)
    return losses, jax.tree.map(np.asarray, (state.master, state.opt_state))


@pytest.fixture(scope="module")
def plain():
    """Three steps of ZeRO-3 over all devices, by the number of microbatches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "WIDTH", WIDTH)
        patch.setattr(models, "HIDDEN", HIDDEN)
        return {n: trained(make_run(num_microbatches=n)) for n in (1, 2)}


def test_sharding_over_nodes_equals_sharding_inside_them(plain):
    """Fails if nodes average what they should add, or leave each other out."""
    losses, _ = trained(make_run(replicas=None))
    np.testing.assert_allclose(plain[1][0], losses, rtol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_secondary_partition_changes_no_bit(plain, num_microbatches):
    """Fails if a partition is stale, or gradients take another way."""
    found = trained(make_run(HPZ, num_microbatches=num_microbatches))
    jax.tree.map(np.testing.assert_array_equal, found, plain[num_microbatches])


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("features", [(QWZ,), (QGZ,), ALL], ids="+".join)
def test_codes_stay_close_to_plain_steps(plain, features, num_microbatches):
    """Fails if a sum is a mean: Adam's first moment is a mean of gradients.

    Four bits for the largest of 64 numbers leave an error of a seventh in all.
    """
    expected = plain[num_microbatches]
    found = trained(make_run(*features, num_microbatches=num_microbatches))
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-3)
    assert (found[0] != expected[0]).any()
    tolerance = 0.2 if QGZ in features else 0.02
    for name in ("up", "down"):
        first, second = (tree[1][1][0].mu[name] for tree in (found, expected))
        error = np.linalg.norm(first - second) / np.linalg.norm(second)
        assert 0 < error < tolerance


def test_a_gradient_that_is_not_finite_skips_the_step():
    """Fails if codes turn NaN into numbers."""
    run = make_run(*ALL)
    batch = models.make_batch()
    batch["y"][3, 5] = np.nan
    before = jax.tree.map(np.asarray, run.state.master)
    state, metrics = run.step(run.state, batch)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.master, before)


def sent_between_nodes(*features):
    """Bytes that leave a node in a step before the compiler merges equal gathers.

    In units of all parameters in float16.
    """
    run = make_run(*features, dtype="float16")
    batch = run.step.place_batch(models.make_batch())
    with jax.set_mesh(run.mesh):
        lowered = run.step.programs["train"].lower(run.state, batch)
    text = lowered.compiler_ir("hlo").as_hlo_text()
    found = [c for c in list_collectives(text) if c.elements >= 16]
    total = bytes_leaving_node(found, run.mesh, "replica")
    return total / (2 * memory.num_params(run.plan))


INT8, INT4 = (1 + 4 / 2_048) / 2, (1 / 2 + 4 / 64) / 2
"""Sizes of a coded element, scales included, in units of a float16 element."""


@pytest.mark.parametrize(
    ("features", "sent", "of_paper"),
    [
        ((), 7 / 8 * 3, 2.625),
        ((QWZ,), 7 / 8 * (2 * INT8 + 1), 2.1875),
        ((HPZ,), 1 / 2 + 7 / 8, 1.75),
        ((QWZ, HPZ), INT8 / 2 + 7 / 8, 1.3125),
        (ALL, INT8 / 2 + INT4 / 2, 0.5625),
    ],
)
def test_bytes_between_nodes(features, sent, of_paper):
    """Fewer than in the paper: a node gathers its partition once, by 4 small rings.

    Without a partition both passes gather int8.
    """
    found = sent_between_nodes(*features)
    assert found == pytest.approx(sent, rel=0.005)
    assert found <= 1.01 * of_paper


def test_plan_says_what_is_coded_and_stored_by_node():
    """Fails if the bias of 7 has codes, or the partition's bytes are not counted."""
    run = make_run(*ALL, dtype="float16")
    spent = memory.tree_bytes([run.plan.compute["up"], run.plan.compute["down"]])
    assert spent == 2 * 2 * MATRIX // 4
    text = describe_plan(run.plan).split("gradient sum")[1].splitlines()
    assert [" ".join(line.split()) for line in text[1:10]] == [
        "bias 7 in 8 float32 data+replica device 4 B",
        "down 512x64 float32 (int4) data+replica,- device 16.38 kB",
        "scale 64 float32 data+replica device 32 B",
        "up 64x512 float32 (int4) data+replica,- device 16.38 kB",
        "params of a node x4 32.80 kB",
        "bias 7 in 8 float16 data+replica device 2 B",
        "down 512x64 float16 (int8) data,- device 16.38 kB",
        "scale 64 float16 data device 32 B",
        "up 64x512 float16 (int8) data,- device 16.38 kB",
    ]


def test_shards_of_a_node_are_adjacent():
    """Fails if a node gathers its partition from shards that lie apart."""
    row = make_run().plan.master["up"]
    indices = row.stored.devices_indices_map(row.stored_shape)
    order = sorted(indices, key=lambda device: indices[device][0].start)
    assert [device.id for device in order] == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"separable": False},
            "zero.replicas.quantized_weights=True needs a loss that is a mean over "
            "rows; "
            "use False, or a zjax.Model with separable=True",
        ),
        (
            {"loops_over_layers": True},
            "zero.replicas.quantized_weights=True gathers the layers one by one, and "
            "the model "
            "loops over them; use False, or model.layers_per_scan=0",
        ),
    ],
)
def test_models_whose_collectives_are_not_exact_are_refused(changes, expected):
    model = dataclasses.replace(separable_model(), **changes)
    with pytest.raises(PlanError) as error:
        make_run(QWZ, model=model)
    assert str(error.value) == expected


CODES = (
    "zero.replicas.{}=True codes nothing: no matrix has shards of 2,048 elements; use "
    "False, a "
    "smaller zero.min_shard_elements or a larger model"
)
MOVES = (
    "zero.replicas.secondary_partition=True moves nothing: no array is sharded in a "
    "dim that "
    "the devices divide; use False, a smaller zero.min_shard_elements or a larger "
    "model"
)


@pytest.mark.parametrize(
    ("features", "hidden", "min_elements", "problems"),
    [
        (ALL, HIDDEN, 2**20, [MOVES, CODES.format(QWZ), CODES.format(QGZ)]),
        (ALL, HIDDEN // 8, 0, [CODES.format(QWZ), CODES.format(QGZ)]),
        ((QGZ,), HIDDEN // 8, 0, [CODES.format(QGZ)]),
    ],
    ids=["nothing-sharded", "small-shards", "one-setting"],
)
def test_settings_that_change_no_array_are_refused(
    monkeypatch, features, hidden, min_elements, problems
):
    """Fails if a model of small arrays trains as if nothing had been asked for."""
    monkeypatch.setattr(models, "HIDDEN", hidden)
    zero = schema.Zero(
        stage=3, min_shard_elements=min_elements, replicas=sharded(features)
    )
    with pytest.raises(PlanError) as error:
        runs.make_small_plan(
            optax.sgd(0.1), 3, mesh=schema.Mesh(replica=2, data=4), zero=zero
        )
    assert str(error.value) == "\n".join(problems)
