# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: one Flax model, four ZeRO stages
#
# [Open in Colab][colab]
#
# A plain Flax NNX network learns to tell two spirals apart on eight devices. zjax
# decides where each array lives; the network, the optimizer and the loss know nothing
# of it.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/quickstart.ipynb

# %%
# Installs zjax where it is missing, as in Colab.
import importlib.util
import shutil
import subprocess
import sys

# The URL of a wheel, or of a clone: file:///content/zjax
ZJAX = ""
if importlib.util.find_spec("zjax") is None:
    assert ZJAX, "zjax is not installed; set ZJAX to the URL of its wheel or clone"
    gpu = "[cuda12]" if shutil.which("nvidia-smi") else ""
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*command, f"zjax{gpu} @ {ZJAX}"], check=True)

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import zjax

# Eight simulated devices on the CPU; on a machine with GPUs these are used instead.
jax.config.update("jax_num_cpu_devices", 8)
num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 300))
jax.devices()


# %% [markdown]
# ## The model, the data and the loss
#
# Nothing here is particular to zjax, but for the form of the loss: it takes the model,
# a batch and a random key, and returns a mean, or `(mean, weight, metrics)`.


# %%
class Network(nnx.Module):
    def __init__(self, rngs):
        sizes = [(2, 256), (256, 256), (256, 256)]
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])
        self.head = nnx.Linear(256, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.head(x)


def loss_fn(model, batch, key):
    logits = model(batch["point"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["arm"])
    accuracy = (logits.argmax(-1) == batch["arm"]).mean()
    return loss.mean(), loss.size, {"accuracy": accuracy}


def make_batch(seed, size=512):
    rng = np.random.default_rng(seed)
    arm = rng.integers(2, size=size)
    radius = np.sqrt(rng.uniform(size=size))
    angle = 9 * radius + np.pi * arm
    point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    point += rng.normal(scale=0.02, size=point.shape)
    return {"point": point.astype(np.float32), "arm": arm.astype(np.int32)}


# %% [markdown]
# ## One stage
#
# `initialize` plans the place of every array and creates the parameters there. Stage 3
# splits everything but small arrays, which stay whole.


# %%
def start(stage):
    config = {
        "zero": {"stage": stage},
        "precision": {"compute_dtype": "float32"},
    }
    return zjax.initialize(Network, optax.adamw(1e-3), loss_fn, make_batch(0), config)


print(zjax.describe_plan(start(3).plan))

# %% [markdown]
# ## All stages
#
# Each stage trains the same network from the same seed on the same batches.


# %%
def held_bytes(tree):
    device = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


losses, memory = {}, {}
for stage in range(4):
    run = start(stage)
    state = run.state
    losses[stage] = []
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(step))
        losses[stage].append(float(metrics["loss"]))
    memory[stage] = held_bytes(state)

metrics = run.evaluate(state, make_batch(seed=10**6, size=4096))
print(f"accuracy on new points: {metrics['accuracy']:.3f}")

# %% [markdown]
# The stages compute the same thing, so the curves lie on one another. What differs is
# the memory that one device holds between steps. (Stages 2 and 3 differ from stage 1
# during a step: gradients, and the copy of the parameters that computes, are split.)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for stage, width in zip(losses, (8, 5, 3, 1), strict=True):
    left.semilogy(losses[stage], linewidth=width, label=f"stage {stage}")
left.set(xlabel="step", ylabel="loss")
left.legend()
right.bar([str(stage) for stage in memory], [b / 2**20 for b in memory.values()])
right.set(xlabel="stage", ylabel="MiB on one device between steps")
plt.show()

# %% [markdown]
# ## Use the trained model
#
# `run.bind` gives back the NNX module, in evaluation mode.

# %%
model = run.bind(state)
axis = np.linspace(-1, 1, 200, dtype=np.float32)
grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
arm = jnp.argmax(model(grid), axis=-1).reshape(200, 200)
plt.figure(figsize=(4, 4))
plt.contourf(axis, axis, arm, alpha=0.3)
points = make_batch(0)
plt.scatter(*points["point"].T, c=points["arm"], s=4)
plt.axis("equal")
plt.show()
