"""A step on examples equals a plain oracle, on every mesh and with any microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import policies
from tests.support.first_state import first_state, first_weights
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.data.packing import stack_pieces
from zjax.models.build import make_model
from zjax.run.build import make_run

LENGTH = 16
SHAPES = [
    [((2, 3), (2, 1)), ((1, 2), (1, 4))],
    [((4, 2), (4, 6))],
    [((3, 1), (3, 1)), ((1, 1), (1, 2))],
    [((2, 6), (2, 5))],
    [((1, 3), (1, 9))],
    [((5, 2), (5, 2))],
    [((1, 1), (1, 1)), ((1, 2), (1, 3))],
    [((2, 2), (2, 7))],
]
"""Rows of pairs, each with tokens of prompt and completion of the chosen and the
rejected."""


def make_config(kind, settings=""):
    given = {
        "global_batch_size": 8,
        "zero": {"stage": 0, "min_shard_elements": 0},
        "precision": {"compute_dtype": "float32"},
        "optimizer": {"clip_norm": float("inf")},
        "model": policies.MODEL,
        "data": {"length": LENGTH, "source": "tokens", "path": "pairs"},
        "preference": kind,
    }
    return zjax.load_config(given, "data.packing=documents", *settings.split())


@functools.cache
def make_batch():
    """Pairs of random tokens in rows, and what is known of each sequence."""
    rng = np.random.default_rng(0)
    rows, answers, sequences = [], [], []
    examples = np.zeros((8, 2, 2), np.int32)
    reference = np.zeros((8, 2, 2), np.float32)
    for row, pairs in enumerate(SHAPES):
        pieces, flags = [], []
        for place, pair in enumerate(pairs):
            for k, (num_prompt, num_tokens) in enumerate(pair):
                ids = rng.integers(1, policies.VOCAB, num_prompt + num_tokens)
                pieces.append((ids, True))
                flags.append((np.arange(len(ids)) >= num_prompt, True))
                examples[row, place, k] = len(pieces)
                reference[row, place, k] = -3.7 * num_tokens + rng.normal()
                sequences.append((ids, num_prompt, reference[row, place, k]))
        rows.append(pieces)
        answers.append(flags)
    batch = stack_pieces(rows, LENGTH)
    batch["weights"] *= stack_pieces(answers, LENGTH)["targets"]
    batch["examples"] = examples
    return batch, reference, sequences


@functools.cache
def step_of(kind, settings="mesh.data=1"):
    """The metrics and the change of the parameters of one step of descent."""
    config, (batch, reference, _) = make_config(kind, settings), make_batch()
    if config.preference.reads_reference:
        batch = batch | {"reference_logprobs": reference}
    mesh = config.mesh
    number = mesh.data * mesh.tensor * mesh.pipeline * mesh.sequence
    model = rl.preference_model(config)
    run = make_run(
        config,
        model,
        optax.sgd(1.0),
        devices=jax.devices()[:number],
        batch=batch,
        restore=first_state(config, model),
    )
    before = stacked(unpadded(run.state.master, run.plan.master))
    state, metrics = run.step(run.state, batch)
    after = stacked(unpadded(state.master, run.plan.master))
    return metrics, jax.tree.map(np.subtract, before, after), before


@functools.cache
def expected(kind, layers=""):
    """Mean loss of pairs, each sequence as a row of its own, and the gradient."""
    model = make_model(make_config(kind, layers))
    params = first_weights(model.init)
    sequences = make_batch()[2]
    tokens = np.zeros((len(sequences), LENGTH), np.int32)
    for row, (ids, _, _) in zip(tokens, sequences, strict=True):
        row[: len(ids)] = ids

    def loss(params):
        logprobs = jax.nn.log_softmax(model.bind(params, {})(jnp.asarray(tokens)))
        sums = []
        for row, (ids, first, reference) in enumerate(sequences):
            places = np.arange(first - 1, len(ids) - 1)
            found = logprobs[row, places, ids[first:]]
            sums.append(found.mean() if kind == "simpo" else found.sum() - reference)
        gaps = jnp.stack(sums[0::2]) - jnp.stack(sums[1::2])
        margins = 2.0 * gaps - 1.0 if kind == "simpo" else 0.1 * gaps
        return -jax.nn.log_sigmoid(margins).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


def test_logits_of_any_model_give_the_same_loss():
    """Also where a microbatch has no example."""
    config, (batch, reference, _) = make_config("dpo"), make_batch()
    metrics, _, params = step_of("dpo")
    given = jax.tree.map(jnp.asarray, batch | {"reference_logprobs": reference})
    module = make_model(config).bind(jax.tree.map(jnp.asarray, params), {})
    ids = given["segment_ids"]
    logits = jax.jit(lambda x: module(x, segment_ids=ids))(given["tokens"])
    loss_of = jax.jit(lambda x: rl.preference_loss(logits, x, config.preference))
    loss, weight, found = loss_of(given)
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["margin"], metrics["margin"], rtol=1e-4)
    assert weight == 11
    nothing = given | {"examples": jnp.zeros_like(given["examples"])}
    nothing["weights"] = jnp.zeros_like(given["weights"])
    loss, weight, _ = loss_of(nothing)
    assert loss == weight == 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dpo", "mesh.data=1"),
        ("dpo", "mesh.data=2 num_microbatches=4"),
        ("dpo", "mesh.data=8 zero.stage=3"),
        ("dpo", "mesh.data=1 mesh.tensor=2 mesh.sequence=2"),
        ("dpo", "mesh.data=2 mesh.pipeline=2 num_microbatches=2"),
        ("simpo", "mesh.data=4 num_microbatches=2"),
    ],
)
def test_every_mesh_takes_the_step_of_the_definition(kind, settings):
    """Fails if a mean is taken over microbatches or devices: rows hold 1 or 2 pairs."""
    layers = "model.num_layers=2" if "pipeline" in settings else ""
    metrics, gradient, _ = step_of(kind, f"{settings} {layers}".strip())
    loss, slope = expected(kind, layers)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6),
        gradient,
        jax.tree.map(np.asarray, slope),
    )
