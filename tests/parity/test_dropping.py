"""Stages and parts of a sequence drop the tokens and layers that one device drops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import features
from tests.support.trees import assert_close
from zjax.observe.collectives import list_collectives
from zjax.ops import tokens
from zjax.ops.keys import fold_name
from zjax.ops.tokens import draw_subset
from zjax.sharding.layers import layers_of
from zjax.stack.forward import StackLoss
from zjax.typing import Loss

TOKENS = features.MODELS["layerwise"] + features.TWO
LAYERS = "model.num_layers=3 layer_drop.theta=0.5 layer_drop.gamma=5 "
SEQUENCE = "mesh.sequence=2 mesh.data=2 "
WHOLE = (0, 2)
"""Layers that compute all tokens: the first and the last one."""


def assert_same(found, expected):
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_close(found.weights, expected.weights, rtol=1e-4, atol=2e-5)


@dataclasses.dataclass(frozen=True, eq=False)
class PlainLoss(StackLoss):
    """The loss of a step as a loop over three layers and nothing else."""

    def __call__(self, params, model_state, batch, key):
        stack, number, left_out = self.stack, 3, self.dropping
        num_rows = features.ROWS // 2
        rows = jnp.arange(num_rows)[:, None]
        embed, (blocks,), head = stack.split(params)
        key = fold_name(key, "loss")
        x, context = stack.embed(embed, batch, jax.random.fold_in(key, 0))
        for i, layer in enumerate(layers_of(blocks, number)):
            own, before = jax.random.fold_in(key, i + 1), x
            if i in WHOLE:
                x, _ = stack.segments[0].block(layer, x, context, own)
            else:
                size = {"num_rows": num_rows, "length": x.shape[1]}
                indices = draw_subset(own, num_kept=left_out.num_kept, **size)
                narrow = stack.take_tokens(context, indices)
                new, _ = stack.segments[0].block(layer, x[rows, indices], narrow, own)
                x = x.at[rows, indices].set(new)
            p = 1 - (i + 1) / number * (1 - left_out.theta)
            runs = jax.random.bernoulli(fold_name(own, "layer"), p)
            x = before + jnp.where(runs, (x - before) / p, 0)
        total, weight, _ = stack.head(head, x, batch)
        return Loss(total / weight, weight, model_state, {})


def plainly(model):
    """The model with the loss of `PlainLoss`."""
    return dataclasses.replace(model, loss=PlainLoss(model.stack, model.loss.execution))


def test_a_pipeline_drops_what_a_loop_over_layers_drops():
    """Fails if a slot is whole or cut in one stage alone, draws by its slot or device,
    or if layers that fill up a stage run. A span of one layer draws as that layer."""
    pipeline = "mesh.pipeline=2 mesh.data=2 zero.stage=2 pipeline.recompute=False "
    config = features.config_of(TOKENS + LAYERS + pipeline + "random_ltd=span")
    _, found = features.train(features.start(config, 4))
    alone = features.start(features.config_of(TOKENS + LAYERS), 1, plainly)
    assert_same(found, features.train(alone)[1])


def test_parts_of_a_sequence_draw_their_own_tokens(monkeypatch):
    """Fails if a row draws by its device, or a layer draws the tokens of another."""
    split, alone = (
        features.config_of(TOKENS + x) for x in (SEQUENCE, "model.layers_per_scan=1")
    )
    _, found = features.train(features.start(split, 4))
    monkeypatch.setattr(tokens, "open_size", lambda axis: 2)
    assert_same(found, features.train(features.start(alone, 1))[1])


def test_kept_tokens_stay_on_their_devices():
    """Fails if a subset gathers the stream over the sequence axis."""
    sent = []
    for settings in (TOKENS, "model.num_layers=4 " + features.TWO):
        run = features.start(features.config_of(settings + SEQUENCE), 4)
        batch = features.make_batch(run.config, 0)
        text = run.step.compile(batch, "train", number=1).as_text()
        sent.append(sum(x.elements * x.times for x in list_collectives(text)))
    assert 0 < sent[0] < sent[1]
