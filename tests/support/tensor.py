"""Language models on the tensor axis, small enough to compile in seconds."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.first_state import first_state
from tests.support.steps import make_step
from tests.support.trees import stacked, unpadded
from zjax.config import check_config
from zjax.models.build import make_model
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.settings import schema

ROWS, LENGTH = 8, 16
GPT = schema.Model(
    num_layers=2,
    embed_size=32,
    mlp_size=64,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=509,
    max_length=2 * LENGTH,
    remat="none",
)
LLAMA = dataclasses.replace(
    GPT,
    norm="rms_norm",
    positions=schema.Rotary(),
    activation="swiglu",
    use_bias=False,
    tied_head=False,
)


def make_config(model, mesh, stage=0, *, length=LENGTH, **settings):
    """float32 and SGD: what the mesh changes shows, and is not made larger."""
    precision = settings.pop("precision", schema.Precision(compute_dtype="float32"))
    zero = settings.pop("zero", {"min_shard_elements": 0} if stage else {})
    return schema.Config(
        global_batch_size=ROWS,
        num_steps=10,
        mesh=mesh,
        model=model,
        data=schema.Data(length=length, source="synthetic"),
        zero=schema.Zero(stage=stage, **zero),
        precision=precision,
        optimizer=schema.Optimizer(
            rule=schema.Sgd(),
            schedule=schema.Constant(num_warmup_steps=0),
            peak_learning_rate=0.5,
        ),
        **settings,
    )


def start(config, num_devices):
    check_config(config, num_devices)
    model = make_model(config)
    tx, devices = make_optimizer(config, model), jax.devices()[:num_devices]
    return make_run(
        config, model, tx, devices=devices, restore=first_state(config, model)
    )


def make_batch(config, step):
    shape = (ROWS, config.data.length + 1)
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(config, num_devices, num_steps=3):
    """The losses of some steps, and the weights after them as a flat dict."""
    run = start(config, num_devices)
    state, losses = run.state, []
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(config, step))
        losses.append(float(metrics["loss"]))
    weights = stacked(unpadded(state.master, run.plan.master))
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return np.array(losses), {jax.tree_util.keystr(keys): x for keys, x in leaves}


def compile_step(config, num_devices):
    """The step, its program, and what that sends along the tensor axis alone."""
    check_config(config, num_devices)
    step = make_step(config, jax.devices()[:num_devices])
    tokens = jax.ShapeDtypeStruct((ROWS, config.data.length), jnp.int32)
    compiled = step.compile({"tokens": tokens, "targets": tokens})
    found = list_collectives(compiled.as_text())
    along = [c for c in found if mesh_axes(c.groups, step.mesh) == ("tensor",)]
    return step, compiled, along


def sent_per_layer(model, mesh, num_devices, *, length=LENGTH, **settings):
    """How often a layer sends a whole stream in a step, and all its other elements."""
    counts: dict[str, int] = collections.Counter()
    others = 0
    for num_layers, sign in ((2, 1), (1, -1)):
        deep = dataclasses.replace(model, num_layers=num_layers)
        config = make_config(deep, mesh, length=length, **settings)
        step, _, found = compile_step(config, num_devices)
        stream = ROWS // step.plan.num_batch_shares * length * model.embed_size
        for each in found:
            streams, rest = divmod(each.elements, stream)
            counts[each.op] += sign * each.times * streams
            others += sign * each.times * rest
    return {op: count for op, count in counts.items() if count}, others
