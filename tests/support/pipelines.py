"""Small language models in a pipeline, and the same on one device."""

import dataclasses
import functools

import jax
import numpy as np

from tests.support import rules
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run
from zjax.settings import convert, schema

ROWS, LENGTH, WIDTH, VOCABULARY = 16, 8, 16, 40


def made_by(pipeline):
    """Schedule of the stages from a mapping with a kind, or None."""
    settings = {"pipeline": pipeline or {}}
    return convert.from_mapping(schema.Config, settings).pipeline


def make_config(
    *,
    mesh=None,
    stage=1,
    num_microbatches=4,
    pipeline=None,
    compute_dtype="float32",
    optimizer="adamw",
    clip_norm=1.0,
    ema_decay=0.0,
    **model,
):
    shape = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "mlp_size": 24}
    shape |= {"vocab_size": VOCABULARY, "max_length": LENGTH, "remat": "none"}
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        mesh=schema.Mesh(**(mesh or {})),
        pipeline=made_by(pipeline),
        zero=schema.Zero(stage=stage, min_shard_elements=0),
        precision=schema.Precision(compute_dtype=compute_dtype),
        optimizer=rules.optimizer(
            optimizer,
            num_warmup_steps=0,
            peak_learning_rate=0.01,
            clip_norm=clip_norm,
            ema_decay=ema_decay,
        ),
        model=schema.Model(embed_size=WIDTH, **(shape | model)),
        data=schema.Data(length=LENGTH),
    )


def make_batch(step):
    """Rows of unequal weight, so that a mean of means would show."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = rng.random((ROWS, LENGTH)) > rng.random((ROWS, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights.astype(np.float32),
    }


def start(config, devices=None):
    model = make_model(config)
    return make_run(config, model, make_optimizer(config, model), devices=devices)


def train(run, num_steps=3, *, evaluates=True):
    """Losses, the loss of an unseen batch, and the weights in their logical shapes.

    Without dropout, a further step has the loss of an evaluation and no new program.
    """
    state, losses = run.state, []
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(step))
        losses.append(float(metrics["loss"]))
    weights, unseen = whole(state.master, run.plan.master), make_batch(99)
    metrics = run.evaluate(state, unseen) if evaluates else run.step(state, unseen)[1]
    return [*losses, float(metrics["loss"])], weights


def whole(arrays, rows):
    """Arrays in their logical shapes."""

    def cut(x, row):
        return np.asarray(x)[tuple(map(slice, row.shape))]

    return jax.tree.map(cut, arrays, rows)


@functools.cache
def on_one_device(num_microbatches=4, optimizer="adamw", num_steps=3, **model):
    model = {"layers_per_scan": 1} | model  # which compiles in less time
    config = make_config(
        stage=0, num_microbatches=num_microbatches, optimizer=optimizer, **model
    )
    run = start(config, jax.devices()[:1])
    return train(run, num_steps, evaluates="dropout_rate" in model)


def losses_of_replicas(optimizer, num_steps):
    """Losses of two replicas of a whole model, and of a model in two stages."""
    for stages in (1, 2):
        config = make_config(
            mesh={"replica": 2, "pipeline": stages},
            stage=0,
            pipeline={"recompute": False} if stages > 1 else None,
        )
        config = dataclasses.replace(config, optimizer=optimizer, num_steps=12)
        run = start(config, jax.devices()[: 2 * stages])
        yield train(run, num_steps, evaluates=False)[0]
