"""Small language models in a pipeline, and the same on one device."""

import dataclasses

import jax
import numpy as np

from tests.support import rules
from tests.support.first_state import first_state
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
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
    optimizer="sgd",
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
    tx, restore = make_optimizer(config, model), first_state(config, model)
    return make_run(config, model, tx, devices=devices, restore=restore)


def losses_of_replicas(optimizer, num_steps):
    """Losses of two replicas of a whole model, and of a model in two stages."""
    for stages in (1, 2):
        config = make_config(
            mesh={"replica": 2, "pipeline": stages},
            stage=0,
            pipeline={"recompute": False} if stages > 1 else None,
        )
        config = dataclasses.replace(config, optimizer=optimizer, num_steps=12)
        model, devices = make_model(config), jax.devices()[: 2 * stages]
        run = make_run(config, model, make_optimizer(config, model), devices=devices)
        state, losses = run.state, []
        for step in range(num_steps):
            state, metrics = run.step(state, make_batch(step))
            losses.append(float(metrics["loss"]))
        yield losses
