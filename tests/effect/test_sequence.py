"""The sequence axis must have its effect: these fail when tokens are gathered."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from tests.support import features, language
from tests.support.steps import make_step
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.ops.sparse import sparse_of
from zjax.settings import schema
from zjax_kernels import make_sequence_plan

ROWS, LENGTH, EMBED, VOCAB = 2, 256, 16, 61
PER_DEVICE = LENGTH // 8


def compile_step(sequence, *, stage=3, **settings):
    """One layer, in float32, of which a long sequence is most of the memory."""
    settings = {"num_heads": 8, "num_kv_heads": 8, "remat": "none"} | settings
    model = dataclasses.replace(
        language.LLAMA,
        num_layers=1,
        embed_size=EMBED,
        mlp_size=24,
        vocab_size=VOCAB,
        max_length=LENGTH,
        loss_chunk_tokens=ROWS * PER_DEVICE // 2,
        **settings,
    )
    config = schema.Config(
        global_batch_size=ROWS,
        mesh=schema.Mesh(sequence=sequence),
        zero=schema.Zero(stage=stage, min_shard_elements=0 if stage else 16_384),
        model=model,
        data=schema.Data(length=LENGTH),
        precision=schema.Precision(compute_dtype="float32"),
        optimizer=schema.Optimizer(rule=schema.Sgd()),
    )
    step = make_step(config, jax.devices()[:sequence])
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return step.compile({"tokens": tokens, "targets": tokens}), step.mesh


@pytest.fixture(scope="module", params=["ulysses", "ring"])
def compiled(request):
    return request.param, *compile_step(8, sequence_attention=request.param)


def test_no_activation_is_gathered(compiled):
    """Fails without the pins of tokens, or if chunks of the loss lie on few devices."""
    _, program, _ = compiled
    gathered = [
        each.elements
        for each in list_collectives(program.as_text())
        if each.op in ("all-gather", "all-reduce") and each.dtype == "f32"
    ]
    assert VOCAB * EMBED in gathered
    assert max(gathered) < ROWS * PER_DEVICE * EMBED


def test_attention_sends_what_the_papers_say(compiled):
    way, program, mesh = compiled
    sent = [
        (each.op, each.elements)
        for each in list_collectives(program.as_text())
        if each.op in ("all-to-all", "collective-permute")
        and mesh_axes(each.groups, mesh) == ("sequence",)
    ]
    part = ROWS * PER_DEVICE * EMBED
    if way == "ulysses":
        assert sent == [("all-to-all", part)] * 8
    else:
        assert sent == [("collective-permute", part)] * (2 * 7 + 2 * 7 + 2 * 8)


def test_activations_are_those_of_a_share_of_the_length(compiled):
    """Of whole length there are heads under Ulysses, and numbers of tokens."""
    way, program, _ = compiled
    text = program.as_text()
    assert f"f32[{ROWS},{PER_DEVICE},{EMBED}]" in text
    assert f"f32[2,{ROWS},{PER_DEVICE // 2},{VOCAB}]" not in text
    long = set(re.findall(rf"f32\[(?:\d+,)*{LENGTH}(?:,\d+)*\]", text))
    sizes = {math.prod(map(int, x[4:-1].split(","))) for x in long}
    if way == "ring":
        assert max(sizes, default=0) <= ROWS * LENGTH
    else:  # of one head of two channels, by keys
        assert {x for x in sizes if x % LENGTH**2} <= {ROWS * LENGTH, ROWS * LENGTH * 2}
        assert max(sizes) == ROWS * LENGTH**2


def test_sparse_attention_sends_blocks_and_gathers_no_tokens():
    """Fails if attention takes the tokens of all devices together."""
    settings = "mesh.sequence=2 mesh.data=1 model.sequence_attention=halo "
    settings += "model.remat=full"
    config = features.config_of(features.MODELS["sparse"] + settings)
    step = make_step(config, jax.devices()[:2])
    text = step.compile(features.make_batch(config, 0)).as_text()
    sent = [
        (each.op, each.elements)
        for each in list_collectives(text)
        if mesh_axes(each.groups, step.mesh) == ("sequence",) and each.dtype == "f32"
    ]
    length, attention = config.data.length, sparse_of(config.model)
    assert "all-to-all" not in {op for op, _ in sent}
    assert max((n for op, n in sent if op == "all-gather"), default=0) < length
    blocks = make_sequence_plan(attention.pattern.layout(length), 2).num_blocks_sent
    width = config.model.embed_size * config.model.num_kv_heads // 4
    each = blocks * features.ROWS * attention.block * width
    # keys and values: forward, once more for the backward pass, and their gradients
    assert sum(n for op, n in sent if op == "collective-permute") == 2 * 3 * each


def test_memory_falls_with_the_number_of_devices():
    """Fails if any device holds the activations of whole sequences."""
    whole, parts = (
        compile_step(size, stage=0, remat="full", sequence_attention=way)[0]
        for size, way in ((1, "auto"), (8, "ring"))
    )
    used = [x.memory_analysis().temp_size_in_bytes for x in (whole, parts)]
    assert used[1] < used[0] / 6
