"""A run of a small model, made in one line."""

import jax
import numpy as np

from tests.support import models
from tests.support.first_state import placed
from zjax.run.build import make_run
from zjax.run.step import make_step
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans


def make_config(stage=2, *, mesh=None, min_elements=0, **settings):
    """float32 throughout, so that placement alone can make a difference."""
    precision = settings.pop("precision", schema.Precision(compute_dtype="float32"))
    zero = schema.Zero(stage=stage, min_shard_elements=min_elements)
    return schema.Config(
        global_batch_size=models.BATCH,
        zero=settings.pop("zero", zero),
        mesh=mesh or schema.Mesh(),
        precision=precision,
        **settings,
    )


def make_small_run(tx, stage=2, *, num_devices=8, model=None, **settings):
    config = make_config(stage, **settings)
    model, devices = placed(model or models.make_mlp()), jax.devices()[:num_devices]
    return make_run(config, model, tx, devices=devices)


def make_small_step(tx, stage=2, *, num_devices=8, model=None, **settings):
    """Makes the step of a run without a state, to read its programs."""
    config, model = make_config(stage, **settings), model or models.make_mlp()
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:num_devices])
    return make_step(model, tx, plans.make_plan(config, mesh, model, tx), config)


def make_small_plan(tx, stage, model=None, **settings):
    config = make_config(stage, **settings)
    mesh = meshes.make_mesh(config.mesh)
    return plans.make_plan(config, mesh, model or models.make_mlp(), tx)


def train(run, num_steps, *, first=0, state=None):
    """The losses of some steps and the state after them."""
    state = run.state if state is None else state
    losses = []
    for step in range(first, first + num_steps):
        state, metrics = run.step(state, models.make_batch(step))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


def held_bytes(tree):
    """Bytes on the first device, by the arrays themselves."""
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
