"""Sparse attention inside the built-in models: what it sees, what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.kernels.sparse.dense import attend
from tests.support import language
from tests.support import sparse as small
from zjax.generation.generate import generate
from zjax.jaxprs.program import programs_in, walk
from zjax.models import flops
from zjax.ops import sparse
from zjax.settings import schema

LOCAL = dataclasses.replace(
    small.GPT,
    num_layers=1,
    attention=dataclasses.replace(
        small.SPARSE, pattern=schema.Local(num_sliding_window_blocks=1)
    ),
)
"""Blocks that see themselves alone."""


def value_and_gradients(config, batch):
    model = language.make_language_model(config)
    graph, state = nnx.split(model)

    def loss(state):
        return language.sums_of(nnx.merge(graph, state), batch).loss_sum

    return jax.jit(jax.value_and_grad(loss))(state)


def check_equal(found, expected):
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected[1]))

    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * largest)

    jax.tree.map(compare, found, expected)


@pytest.mark.parametrize(
    ("config", "masked"),
    [
        pytest.param(small.LLAMA, "segment_ids", id="llama-documents"),
        pytest.param(small.BERT, "lengths", id="bert-padding"),
    ],
)
def test_loss_and_gradients_are_those_of_dense_attention_under_the_mask(
    monkeypatch, config, masked
):
    config = dataclasses.replace(config, num_layers=1)
    batch, mask = make_masked_text(config, masked)
    found = value_and_gradients(config, batch)

    def dense(q, k, v, *_, **masks):
        return attend(q, k, v, mask)[0]

    monkeypatch.setattr(sparse, "sparse_attention", dense)
    check_equal(found, value_and_gradients(config, batch))


def make_masked_text(config, masked):
    """A batch, and which of its tokens see each other."""
    length = small.LENGTH
    batch, mask = language.make_text(config, length=length), small.mask_of(config)[None]
    if masked == "lengths":
        lengths = np.array([length, 50])
        keys = np.arange(length) < lengths[:, None]
        batch["weights"] = batch["weights"] * keys
        return batch | {"lengths": jnp.array(lengths)}, mask & keys[:, None, None]
    if masked == "segment_ids":
        ids = np.sort(np.random.default_rng(0).integers(1, 4, (language.ROWS, length)))
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return batch | {"segment_ids": jnp.array(ids)}, mask & same
    return batch, mask


def test_tokens_see_live_blocks_alone():
    """Fails if a later token leaks, or a dead block is read."""
    model = language.make_language_model(LOCAL)
    tokens = language.make_text(LOCAL, length=small.LENGTH)["tokens"]
    before = language.logits_of(model, {"tokens": tokens})
    place = 2 * small.BLOCK + 5
    changed = tokens.at[:, place].set((tokens[:, place] + 1) % LOCAL.vocab_size)
    after = language.logits_of(model, {"tokens": changed})
    differs = np.any(np.asarray(before != after), axis=(0, 2))
    assert np.flatnonzero(differs).tolist() == list(range(place, 3 * small.BLOCK))


def test_a_layout_of_fewer_blocks_asks_for_less_work():
    """Fails if dead blocks are visited: chunks of the plan, and FLOPs of the report."""
    config = dataclasses.replace(LOCAL, max_length=1024)
    everything = dataclasses.replace(small.SPARSE, pattern=schema.Dense())
    dense = dataclasses.replace(config, attention=everything)

    def num_chunks(config):
        plan = sparse._plan(
            sparse.sparse_of(config), 64, num_kv_heads=2, head_size=8, segments=False
        )
        return plan.queries.items[..., 2].clip(0).sum()

    assert num_chunks(config) == 8
    assert num_chunks(dense) == 36
    work, all_work = (
        flops.flops_per_token(each, 1024, causal_attention="half")
        for each in (config, dense)
    )
    half = dataclasses.replace(dense, attention=schema.Xla())
    assert all_work == flops.flops_per_token(half, 1024, causal_attention="half")
    assert all_work - work == 6 * config.num_layers * config.embed_size * (1024 - 16)


@pytest.mark.parametrize(
    ("policy", "memory", "number"),
    [
        ("none", "device", 1),
        ("elementwise", "device", 1),
        ("attention", "device", 1),
        ("attention_and_mlp", "pinned_host", 1),
        ("full", "device", 2),
    ],
)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_kept_averages_are_not_computed_again(policy, memory, number, on_mesh):
    """Loops over the items of a plan: forward as often as asked, dq, and dk with dv."""
    config = dataclasses.replace(LOCAL, remat=policy, activation_memory=memory)
    graph, state = nnx.split(language.make_language_model(config))
    batch = language.make_text(config, length=small.LENGTH)

    def loss(state):
        return language.sums_of(nnx.merge(graph, state), batch).loss_sum

    size = 2 if on_mesh else 1
    mesh = jax.make_mesh((size,), ("data",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(jax.grad(loss))(state)
    assert len(list(top_loops(program))) == number + 2


def top_loops(program):
    for each in program.eqns:
        if each.primitive.name == "while":
            yield each
            continue
        for inner in programs_in(each):
            yield from top_loops(inner)


SORTS_OF_A_PLAN = 4
"""Two in each direction, when a window limits it."""


@pytest.mark.parametrize(
    ("mesh", "num_heads", "scan"),
    [({}, 2, 0), ({}, 2, 1), ({"tensor": 2}, 2, 1), ({"tensor": 4}, 8, 1)],
    ids=["unrolled", "scanned", "heads", "shared"],
)
def test_the_plan_of_a_window_is_made_once_for_all_layers(mesh, num_heads, scan):
    """Fails if layers limit it, forward or where the backward pass recomputes them.

    Devices that share a head of keys have a copy each, which the plan counts.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": 2}
    config = dataclasses.replace(small.GPT, remat="full", layers_per_scan=scan, **heads)
    graph, state = nnx.split(language.make_language_model(config))
    batch = language.make_text(config, length=small.LENGTH)
    batch["schedule"] = {"attention_window": jnp.float32(20)}

    def loss(state):
        return language.sums_of(nnx.merge(graph, state), batch).loss_sum

    auto = (jax.sharding.AxisType.Auto,) * len(mesh)
    with jax.set_mesh(jax.make_mesh((*mesh.values(),), (*mesh,), auto)):
        program = jax.make_jaxpr(jax.grad(loss))(state)
    assert count(program, "sort") == SORTS_OF_A_PLAN
    loops = [each for each in walk(program) if each.primitive.name == "scan"]
    layers = [x for x in loops if x.params["length"] == config.num_layers]
    assert len(layers) >= 2 * scan
    assert not any(count(x, "sort") for each in layers for x in programs_in(each))


def count(program, name):
    return sum(each.primitive.name == name for each in walk(program))


@pytest.mark.parametrize("config", [small.GPT, small.LLAMA], ids=["gpt", "llama"])
def test_text_from_a_cache_is_that_of_the_whole_sequence(config):
    """Prompts whose ends lie in different blocks, one of them padded."""
    model = language.make_language_model(config)
    prompt = language.make_text(config, length=40)["tokens"]
    lengths = jnp.array([40, 27], jnp.int32)
    found = generate(model, prompt, lengths=lengths, max_new_tokens=30)
    for row, start in enumerate((0, 13)):
        alone = found[row : row + 1, start:]
        most_likely = np.argmax(language.logits_of(model, {"tokens": alone}), -1)
        first = 40 - start
        np.testing.assert_array_equal(alone[:, first:], most_likely[:, first - 1 : -1])
