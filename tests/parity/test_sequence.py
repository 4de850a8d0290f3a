"""A sequence in parts: every mesh, stage and way computes what one device computes."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import language, texts
from tests.support import sparse as patterns
from zjax.settings import schema
from zjax.sharding import plan as plans

ROWS, LENGTH = 8, 32
SLOW = pytest.mark.slow
MODELS = {
    "llama": language.LLAMA,
    "gpt": language.GPT,
    "bert": language.BERT,
    "sparse": dataclasses.replace(patterns.LLAMA, num_heads=4, num_layers=2),
}


def make_config(kind, *, stage=0, mesh=None, zero=None, precision=None, **settings):
    num_microbatches = settings.pop("num_microbatches", 1)
    away = {"min_shard_elements": 0} if stage else {}
    longest = max(LENGTH, MODELS[kind].max_length)
    model = {"max_length": longest, "loss_chunk_tokens": 24, **settings}
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        mesh=mesh or schema.Mesh(),
        model=dataclasses.replace(MODELS[kind], **model),
        data=schema.Data(length=LENGTH, source="synthetic"),
        zero=schema.Zero(stage=stage, **away, **(zero or {})),
        precision=precision or schema.Precision(compute_dtype="float32"),
        optimizer=schema.Optimizer(
            rule=schema.Adamw(eps=0.001), schedule=schema.Cosine(num_warmup_steps=1)
        ),
    )


@pytest.fixture(scope="module")
def alone():
    found = {}

    def get(kind):
        if kind not in found:
            found[kind] = texts.train(make_config(kind), 1, evaluates=False)
        return found[kind]

    return get


AWAY = {"offload": schema.PinnedHost(parameter_memory="pinned_host")}
CASES = {
    "llama-ulysses-3": ("llama", {"stage": 3, "mesh": schema.Mesh(sequence=4)}),
    "llama-ring-2-tensor-accumulated": (
        "llama",
        {
            "stage": 2,
            "mesh": schema.Mesh(sequence=2, tensor=2),
            "num_microbatches": 2,
            "sequence_attention": "ring",
        },
    ),
}
MORE = {
    "bert-ring": ("bert", {"stage": 1, "mesh": schema.Mesh(sequence=8)}),
    "llama-ring-pipeline": (
        "llama",
        {
            "stage": 2,
            "mesh": schema.Mesh(pipeline=2, sequence=2),
            "num_microbatches": 2,
            "sequence_attention": "ring",
            "remat": "full",
        },
    ),
    "llama-ulysses-pipeline-tensor": (
        "llama",
        {
            "stage": 3,
            "mesh": schema.Mesh(pipeline=2, sequence=2, tensor=2),
            "num_microbatches": 4,
            "sequence_attention": "ulysses",
            "remat": "none",
        },
    ),
    "bert-ulysses-2": ("bert", {"stage": 2, "mesh": schema.Mesh(sequence=4)}),
    "gpt-ulysses-3-loop": (
        "gpt",
        {"stage": 3, "mesh": schema.Mesh(sequence=4), "layers_per_scan": 1},
    ),
    "gpt-ring-3-loop-full": (
        "gpt",
        {
            "stage": 3,
            "mesh": schema.Mesh(sequence=8),
            "layers_per_scan": 1,
            "remat": "full",
        },
    ),
    "gpt-ring-0-none": (
        "gpt",
        {
            "mesh": schema.Mesh(sequence=4),
            "remat": "none",
            "sequence_attention": "ring",
        },
    ),
    "llama-ulysses-replica-tensor": (
        "llama",
        {
            "stage": 1,
            "mesh": schema.Mesh(replica=2, sequence=2, tensor=2),
            "remat": "attention",
        },
    ),
    "sparse-ulysses-3": ("sparse", {"stage": 3, "mesh": schema.Mesh(sequence=4)}),
    "llama-ulysses-on-the-host": (
        "llama",
        {"stage": 2, "mesh": schema.Mesh(sequence=4), "zero": AWAY, "remat": "full"},
    ),
    "llama-ring-on-the-host": (
        "llama",
        {
            "stage": 3,
            "mesh": schema.Mesh(sequence=4),
            "zero": AWAY,
            "remat": "full",
            "sequence_attention": "ring",
        },
    ),
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=SLOW) for name, case in MORE.items()),
    ],
)
def test_losses_and_weights_equal_one_device(alone, monkeypatch, kind, settings):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    losses, weights = texts.train(make_config(kind, **settings), 8)
    expected, expected_weights = alone(kind)
    assert len(set(expected)) == len(expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)

    def compare(one, other):
        stored = other[tuple(map(slice, one.shape))]
        np.testing.assert_allclose(stored, one, rtol=1e-5, atol=1e-6)

    if "zero" not in settings:  # layers are stored one by one there
        jax.tree.map(compare, expected_weights, weights)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_bfloat16_is_as_far_as_on_one_device(way):
    precision = schema.Precision(compute_dtype="bfloat16")
    alone, _ = texts.train(make_config("llama", precision=precision), 1)
    config = make_config(
        "llama",
        stage=3,
        mesh=schema.Mesh(sequence=4),
        precision=precision,
        sequence_attention=way,
    )
    losses, _ = texts.train(config, 8)
    np.testing.assert_allclose(losses, alone, rtol=5e-3)
