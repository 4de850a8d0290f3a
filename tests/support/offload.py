"""Runs of small models whose state rests on the host."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import zjax
from tests.support import language, rules
from tests.support.first_state import first_state
from tests.support.trees import stacked
from zjax.models.build import make_model
from zjax.ops.weights import join_bits
from zjax.optim.build import make_optimizer
from zjax.processes.host import RESERVED_SHARE
from zjax.run.build import make_run
from zjax.settings import convert, schema

ROWS, LENGTH, STEPS = 16, 8, 4
GPT = dataclasses.replace(language.GPT, remat="full")
THREE = dataclasses.replace(GPT, num_layers=3)
"""The fewest layers of which one has others on both sides."""
LLAMA = dataclasses.replace(language.LLAMA, remat="full")
BERT = dataclasses.replace(language.BERT, remat="full")


UNDER_BACKWARD = {
    "optimizer": {"clip_norm": math.inf},
    "precision": {"on_nonfinite": "update"},
}
"""Settings under which no update waits for all gradients."""


INSIDE = ("parameter_memory", "gradient_memory", "nvme_paths", "delay_updates_from")
"""Settings of `zero.offload`."""


def make_zero(memory, **settings):
    """Section `zero` from flat settings, those of offload among them."""
    inside = {name: settings.pop(name) for name in INSIDE if name in settings}
    offload = None if memory == "device" else inside | {"kind": memory}
    return convert.from_mapping(schema.Zero, settings | {"offload": offload})


def on_device(config):
    """The same run without offload."""
    zero = dataclasses.replace(config.zero, offload=None)
    return dataclasses.replace(config, zero=zero)


def make_config(memory, stage=2, *, num_microbatches=1, model=GPT, **sections):
    precision = sections.pop("precision", {})
    optimizer = sections.pop("optimizer", {})
    given = sections.pop("zero", {})
    zero = make_zero(memory, stage=stage, min_shard_elements=0, **given)
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        model=model,
        data=schema.Data(length=LENGTH, source="synthetic"),
        zero=zero if stage else dataclasses.replace(zero, min_shard_elements=16_384),
        precision=schema.Precision(**{"compute_dtype": "float32"} | precision),
        optimizer=rules.optimizer(**{"num_warmup_steps": 1, "eps": 1e-4} | optimizer),
        **sections,
    )


def make_batch(step, vocab_size=29):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = rng.uniform(0.5, 1, (ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def start(config, tx=None, devices=None, weights=None):
    """A run from weights that are placed, or drawn as a user's are if they are `()`."""
    model = make_model(config)
    if tx is None:
        tx = make_optimizer(config, model)
    else:
        tx = zjax.adopt_optimizer(tx, model, config)
    is_fresh = weights == () or config.checkpoint.init_from
    restore = None if is_fresh else first_state(config, model, weights)
    return make_run(config, model, tx, devices=devices, restore=restore)


def train(run, steps=STEPS):
    state, found = run.state, []
    for step in range(steps):
        state, metrics = run.step(state, make_batch(step))
        found.append({name: float(x) for name, x in metrics.items()})
    return state, found


def weights_of(state):
    """Whole master weights by path, stacked as without offload."""
    master = in_memory(state.master)
    if any(x.dtype == np.int16 for x in jax.tree.leaves(master)):
        master = jax.tree.map(whole, master, state.params)
    return stacked(master)


def whole(x, upper):
    """Master weights from what is stored of them."""
    if x.dtype != np.int16:
        return x
    upper = np.asarray(upper)[tuple(map(slice, x.shape))]
    pairs = zip(x.shape, upper.shape, strict=True)
    upper = np.pad(upper, [(0, stored - size) for stored, size in pairs])
    return join_bits(upper, x)


def in_memory(tree):
    """Arrays of NumPy, wherever they are stored."""
    return jax.tree.map(np.asarray, tree)


def arrays_besides(others):
    """Arrays that exist and are not among others, which must exist as well."""
    known = set(map(id, others))
    return [x for x in jax.live_arrays() if id(x) not in known and not x.is_deleted()]


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.nbytes >= 512}


class Perceptron(linen.Module):
    """A user's model, which is no line of blocks."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(32)(x)))


def smallest_host(pinned_bytes):
    """Bytes of a host of which so many may be pinned, and no fixed part is kept."""
    return int(pinned_bytes / (1 - RESERVED_SHARE)) + 1
