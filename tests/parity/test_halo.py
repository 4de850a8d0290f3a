"""Sparse attention over sequences in parts trains as it does on one device."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import sparse as small
from zjax.config import check_config, schema
from zjax.initialize import make_run
from zjax.models.build import make_model
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.ops import sparse
from zjax.optim.build import make_optimizer
from zjax.sharding import plan as plans
from zjax_kernels import make_sequence_plan

ROWS, LENGTH, STEPS = 2, 512, 3
BLOCK = 128
SLOW = pytest.mark.slow
MODELS = {"gpt": small.GPT, "llama": small.LLAMA, "bert": small.BERT}


def make_config(kind, *, stage=0, mesh=None, zero=None, num_microbatches=1, **model):
    """Two heads, which four devices cannot share: `auto` leaves tokens in place."""
    away = {"min_shard_elements": 0} if stage else {}
    settings = {"num_layers": 2, "max_length": LENGTH, "remat": "full", **model}
    settings["sparsity"] = schema.Sparsity(mode="bigbird", block=BLOCK)
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        mesh=mesh or schema.Mesh(),
        model=dataclasses.replace(MODELS[kind], **settings),
        data=schema.Data(length=LENGTH, source="synthetic"),
        zero=schema.Zero(stage=stage, **away, **(zero or {})),
        precision=schema.Precision(compute_dtype="float32"),
        optimizer=schema.Optimizer(eps=1e-3, num_warmup_steps=1),
    )


def make_batch(kind, step):
    """Documents with padding, or padded rows of an encoder."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 29, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if kind == "bert":
        return batch | {"lengths": rng.integers(1, LENGTH + 1, ROWS).astype(np.int32)}
    documents = np.sort(rng.integers(1, 4, (ROWS, LENGTH)), 1).astype(np.int32)
    documents[:1, 400:] = 0
    return batch | {"segment_ids": documents}


def make(kind, num_devices, **settings):
    config = make_config(kind, **settings)
    check_config(config, num_devices)
    model = make_model(config)
    devices = jax.devices()[:num_devices]
    return make_run(config, model, make_optimizer(config, model), devices=devices)


def train(kind, num_devices, **settings):
    run = make(kind, num_devices, **settings)
    state, losses = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, make_batch(kind, step))
        losses.append(float(metrics["loss"]))
    return [*losses, float(run.evaluate(state, make_batch(kind, STEPS))["loss"])]


@pytest.fixture(scope="module")
def alone():
    found = {}

    def get(kind):
        if kind not in found:
            found[kind] = train(kind, 1)
            assert len(set(found[kind])) == len(found[kind])
        return found[kind]

    return get


AWAY = {"optimizer_memory": "pinned_host", "parameter_memory": "pinned_host"}
IN_FOUR, HALO = schema.Mesh(sequence=4), {"sequence_attention": "halo"}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("llama", {"stage": 3, "mesh": IN_FOUR}, id="llama-3"),
        pytest.param("bert", {"stage": 1, "mesh": IN_FOUR}, id="bert-1", marks=SLOW),
        pytest.param(
            "gpt",
            {
                "stage": 2,
                "mesh": schema.Mesh(pipeline=2, sequence=2, tensor=2),
                "num_microbatches": 2,
                **HALO,
            },
            id="gpt-2-pipeline-tensor",
            marks=SLOW,
        ),
        pytest.param(
            "gpt",
            {"stage": 3, "mesh": IN_FOUR, "layers_per_scan": 1, "remat": "none"},
            id="gpt-3-loop",
            marks=SLOW,
        ),
        pytest.param(
            "gpt",
            {
                "stage": 2,
                "mesh": schema.Mesh(sequence=4, tensor=2),
                "num_microbatches": 2,
                "remat": "attention",
            },
            id="gpt-2-tensor-accumulated",
            marks=SLOW,
        ),
        pytest.param(
            "gpt",
            {"stage": 2, "mesh": IN_FOUR, "zero": AWAY},
            id="gpt-2-on-the-host",
            marks=SLOW,
        ),
    ],
)
def test_losses_equal_one_device(alone, monkeypatch, kind, settings):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    found = train(kind, 8, **settings)
    np.testing.assert_allclose(found, alone(kind), rtol=1e-5, atol=1e-6)


def test_a_step_sends_blocks_and_gathers_no_tokens():
    """Fails if attention takes the tokens of all devices together."""
    run = make("gpt", 4, mesh=IN_FOUR, num_layers=1)
    text = run.step.compile(make_batch("gpt", 0)).as_text()
    sent = [
        (each.op, each.elements)
        for each in list_collectives(text)
        if mesh_axes(each.groups, run.step.mesh) == ("sequence",)
        and each.dtype == "f32"
    ]
    ops = {op for op, _ in sent}
    assert "all-to-all" not in ops
    assert max((n for op, n in sent if op == "all-gather"), default=0) < LENGTH
    pattern = sparse.sparse_of(run.config.model).pattern
    blocks = make_sequence_plan(pattern.layout(LENGTH), 4).num_blocks_sent
    each = blocks * ROWS * BLOCK * run.config.model.embed_size
    # keys and values: forward, once more for the backward pass, and their gradients
    assert sum(n for op, n in sent if op == "collective-permute") == 2 * 3 * each
