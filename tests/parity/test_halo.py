"""Sparse attention over sequences in parts trains as it does on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.support import sparse as small
from tests.support import texts
from tests.support.steps import make_step
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.ops import sparse
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax_kernels import make_sequence_plan

ROWS, LENGTH = 2, 512
BLOCK = 128
SLOW = pytest.mark.slow
MODELS = {"gpt": small.GPT, "llama": small.LLAMA, "bert": small.BERT}


def make_config(kind, *, stage=0, mesh=None, zero=None, num_microbatches=1, **model):
    """Two heads, which four devices cannot share: `auto` leaves tokens in place."""
    away = {"min_shard_elements": 0} if stage else {}
    settings = {"num_layers": 2, "max_length": LENGTH, "remat": "full", **model}
    settings["attention"] = schema.Sparse(pattern=schema.Bigbird(), block=BLOCK)
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        mesh=mesh or schema.Mesh(),
        model=dataclasses.replace(MODELS[kind], **settings),
        data=schema.Data(length=LENGTH, source="synthetic"),
        zero=schema.Zero(stage=stage, **away, **(zero or {})),
        precision=schema.Precision(compute_dtype="float32"),
        optimizer=schema.Optimizer(
            rule=schema.Adamw(eps=0.001), schedule=schema.Cosine(num_warmup_steps=1)
        ),
    )


@pytest.fixture(scope="module")
def alone():
    @functools.cache
    def get(kind, **model):
        found, _ = texts.train(make_config(kind, **model), 1, evaluates=False)
        assert len(set(found)) == len(found)
        return found

    return get


AWAY = {"offload": schema.PinnedHost(parameter_memory="pinned_host")}
IN_FOUR, HALO = schema.Mesh(sequence=4), {"sequence_attention": "halo"}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(
            "llama", {"stage": 3, "mesh": IN_FOUR, "num_layers": 1}, id="llama-3"
        ),
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
    found, _ = texts.train(make_config(kind, **settings), 8)
    depth = {name: n for name, n in settings.items() if name == "num_layers"}
    np.testing.assert_allclose(found, alone(kind, **depth), rtol=1e-5, atol=1e-6)


def test_a_step_sends_blocks_and_gathers_no_tokens():
    """Fails if attention takes the tokens of all devices together."""
    config = make_config("gpt", mesh=IN_FOUR, num_layers=1)
    step = make_step(config, jax.devices()[:4])
    text = step.compile(texts.make_batch(config, 0)).as_text()
    sent = [
        (each.op, each.elements)
        for each in list_collectives(text)
        if mesh_axes(each.groups, step.mesh) == ("sequence",) and each.dtype == "f32"
    ]
    ops = {op for op, _ in sent}
    assert "all-to-all" not in ops
    assert max((n for op, n in sent if op == "all-gather"), default=0) < LENGTH
    pattern = sparse.sparse_of(config.model).pattern
    blocks = make_sequence_plan(pattern.layout(LENGTH), 4).num_blocks_sent
    each = blocks * ROWS * BLOCK * config.model.embed_size
    # keys and values: forward, once more for the backward pass, and their gradients
    assert sum(n for op, n in sent if op == "collective-permute") == 2 * 3 * each
