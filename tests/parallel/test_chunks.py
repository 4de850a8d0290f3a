"""Feed-forwards in chunks of tokens: the same numbers, and less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import language
from tests.support.steps import make_step
from zjax.observe.collectives import list_collectives
from zjax.parallel.sequence import by_chunks
from zjax.settings import schema

ROWS, LENGTH, HIDDEN = 8, 64, 512


@pytest.mark.parametrize("chunk_tokens", [1, 4, 6, 7, 100])
def test_chunks_give_what_all_tokens_give(chunk_tokens):
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(2, 7, 3)), rng.normal(size=(3, 3))

    def loss(matrix, x, chunk_tokens):
        y = by_chunks(lambda part: jnp.sin(part @ matrix), x, chunk_tokens)
        return jnp.sum(y * jnp.arange(1.0, 8.0)[None, :, None])

    run = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    for one, other in zip(
        jax.tree.leaves(run(matrix, x, chunk_tokens)),
        jax.tree.leaves(run(matrix, x, 0)),
        strict=True,
    ):
        # Sums of numbers up to 30 cancel, on some processors by other roundings.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def compile_step(mlp_chunk_tokens, **mesh):
    """One wide layer, in float32, whose hidden values are most of the memory."""
    model = dataclasses.replace(
        language.LLAMA,
        num_layers=1,
        mlp_size=HIDDEN,
        max_length=LENGTH,
        loss_chunk_tokens=64,
        remat="full",
        mlp_chunk_tokens=mlp_chunk_tokens,
    )
    config = schema.Config(
        global_batch_size=ROWS,
        mesh=schema.Mesh(**mesh),
        zero=schema.Zero(stage=3 if mesh else 0, min_shard_elements=0),
        model=model,
        data=schema.Data(length=LENGTH),
        precision=schema.Precision(compute_dtype="float32"),
    )
    step = make_step(config, jax.devices()[: 8 if mesh else 1])
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return step.compile({"tokens": tokens, "targets": tokens})


def test_hidden_values_of_one_chunk_exist():
    """Fails if chunks have no effect, or are all kept for the backward pass."""
    whole, chunked = (
        compile_step(size).memory_analysis().temp_size_in_bytes for size in (0, 64)
    )
    hidden = ROWS * LENGTH * HIDDEN * 4
    assert whole - chunked > 5 * hidden


def test_a_decoder_has_the_same_loss_and_gradients():
    rng = np.random.default_rng(0)
    tokens = jnp.array(rng.integers(language.GPT.vocab_size, size=(2, 8)))
    batch = {"tokens": tokens, "targets": tokens}

    def of(chunk_tokens):
        model = dataclasses.replace(
            language.LLAMA, remat="full", mlp_chunk_tokens=chunk_tokens
        )
        graph, state = nnx.split(language.make_language_model(model))

        def loss(state):
            return language.sums_of(nnx.merge(graph, state), batch).loss_sum

        return jax.jit(jax.value_and_grad(loss))(state)

    for one, other in zip(*map(jax.tree.leaves, (of(6), of(0))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def test_chunks_move_nothing_between_devices():
    """Each takes part of every device's tokens: only gathers of a split stream are
    smaller and in a loop."""
    mesh = {"data": 2, "sequence": 2, "tensor": 2}
    whole, chunked = (
        {
            (each.op, tuple(map(tuple, each.groups)))
            for each in list_collectives(compile_step(size, **mesh).as_text())
        }
        for size in (0, 64)
    )
    assert chunked == whole
