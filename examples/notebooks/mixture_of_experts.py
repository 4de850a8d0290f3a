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
# # A mixture of experts in your own Flax model
#
# [Open in Colab][colab]
#
# A plain Flax NNX decoder learns Python's standard library, byte by byte. Then its
# feed-forward layers become mixtures of eight experts, of which each token uses two, on
# eight devices that share the experts. At the end you see how even their load was, and
# what each of them is for.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/mixture_of_experts.ipynb

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
import pathlib
import re
import sysconfig
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Image, display

import zjax
from zjax.moe.router import Router
from zjax.observe import plot_load

# Eight simulated devices on the CPU; on a machine with GPUs these are used instead.
jax.config.update("jax_num_cpu_devices", 8)
num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 300))
WIDTH, HIDDEN, LENGTH, ROWS = 96, 192, 64, 32

library = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
text = b"".join(file.read_bytes() for file in sorted(library))
codes = np.frombuffer(text, np.uint8).astype(np.int32)


def make_batch(seed):
    starts = np.random.default_rng(seed).integers(len(codes) - LENGTH, size=ROWS)
    windows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


# %% [markdown]
# ## The plain model
#
# Nothing in it knows of zjax. Its feed-forward is twice as wide as an expert will be,
# so that both models do the same work per token.


# %%
class FeedForward(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(2 * HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.heads = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return x + self.heads(self.norm(x), mask=mask)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = Attention(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = FeedForward(rngs)

    def __call__(self, x):
        x = self.attention(x)
        return x + self.mlp(self.norm(x))


class Decoder(nnx.Module):
    def __init__(self, rngs, block=Block):
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["targets"]
    ).mean()


def dense_loss(model, batch, key):
    return cross_entropy(model(batch["tokens"]), batch)


# %% [markdown]
# ## The same with experts
#
# A block takes `zjax.nnx.MoE` in place of its feed-forward. The layer returns its
# outputs, and a loss that evens the load; the model adds these losses up, and the
# loss function adds them to its own. That is all that changes. (`zjax.linen.MoE` is
# the same layer for Linen.)


# %%
class ExpertBlock(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        router = Router(num_experts=8, top_k=2)
        self.mlp = zjax.nnx.MoE(WIDTH, router, HIDDEN, "gelu", use_bias=True, rngs=rngs)

    def __call__(self, x):
        x = self.attention(x)
        y, loss = self.mlp(self.norm(x))
        return x + y, loss


class Mixture(Decoder):
    def __init__(self, rngs):
        super().__init__(rngs, ExpertBlock)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        total = 0.0
        for block in self.blocks:
            x, loss = block(x)
            total += loss
        return self.head(x), total


def mixture_loss(model, batch, key):
    logits, balance = model(batch["tokens"])
    loss = cross_entropy(logits, batch)
    return loss + balance, batch["targets"].size, {"cross_entropy": loss}


# %% [markdown]
# ## Two runs
#
# `mesh.expert` splits the experts: with 2 each device computes four of the eight, and
# tokens travel to them. ZeRO splits what is stored over all devices. Losses and
# gradients do not depend on either.


# %%
def start(model, loss_fn, **mesh):
    config = {
        "mesh": mesh,
        "zero": {"stage": 2, "min_shard_elements": 1024},
        "precision": {"compute_dtype": "float32"},
    }
    return zjax.initialize(model, optax.adamw(2e-3), loss_fn, make_batch(0), config)


expert_axis = 2 if jax.device_count() % 2 == 0 else 1
dense = start(Decoder, dense_loss)
mixture = start(Mixture, mixture_loss, expert=expert_axis)
print(zjax.describe_plan_totals(mixture.plan))

# %% [markdown]
# ## Which experts are chosen
#
# `chosen_experts` of a layer gives the experts of each token. This function runs the
# model, and asks each layer with what it reads.


# %%
@nnx.jit
def chosen_experts(model, tokens):
    x = model.tokens(tokens) + model.positions(jnp.arange(tokens.shape[1]))
    chosen = []
    for block in model.blocks:
        x = block.attention(x)
        y = block.norm(x)
        chosen.append(block.mlp.chosen_experts(y))
        x += block.mlp(y)[0]
    return jnp.stack(chosen)


def count(chosen):
    return [np.bincount(layer.ravel(), minlength=8).tolist() for layer in chosen]


# %% [markdown]
# ## Train both

# %%
state, dense_losses = dense.state, []
for step in range(num_steps):
    state, metrics = dense.step(state, make_batch(step))
    dense_losses.append(float(metrics["loss"]))

probe = make_batch(10**6)["tokens"]
state, mixture_losses, history = mixture.state, [], []
for step in range(num_steps):
    state, metrics = mixture.step(state, make_batch(step))
    mixture_losses.append(float(metrics["cross_entropy"]))
    if step % 5 == 0:
        chosen = np.asarray(chosen_experts(mixture.bind(state), probe))
        history.append({"step": step, "load": count(chosen)})

plt.figure(figsize=(6, 4))
for name, losses in (("dense", dense_losses), ("8 experts", mixture_losses)):
    window = min(20, num_steps)
    plt.plot(np.convolve(losses, np.ones(window) / window, mode="valid"), label=name)
plt.xlabel("step")
plt.ylabel("cross entropy, mean of 20 steps")
plt.legend()
plt.show()

# %% [markdown]
# ## The load
#
# White is the mean of a layer. A red expert has more tokens, and a blue one fewer. The
# balance loss, with its coefficient `balance_loss=0.01`, evens it after a restless
# beginning.

# %%
with tempfile.TemporaryDirectory() as directory:
    picture = pathlib.Path(directory) / "load.png"
    plot_load(history, picture, title="load of the experts")
    display(Image(picture, width=800))

# %% [markdown]
# ## What they are for
#
# Each row is a kind of byte, and shows where its choices went.

# %%
KINDS = {
    "line break": rb"\n",
    "space": rb"[ \t]",
    "beginning of a word": rb"(?<![A-Za-z0-9_])[A-Za-z_]",
    "rest of a word": rb"[A-Za-z_]",
    "digit": rb"[0-9]",
    "bracket": rb"[()\[\]{}]",
    "quotation mark": rb"['\"`]",
    "other sign": rb"[\x00-\xff]",
}
pattern = re.compile(b"|".join(rb"(%b)" % pattern for pattern in KINDS.values()))
tokens = np.concatenate([make_batch(10**6 + i)["tokens"] for i in range(8)])
kinds = [m.lastindex - 1 for m in pattern.finditer(tokens.astype(np.uint8).tobytes())]
chosen = np.asarray(chosen_experts(mixture.bind(state), tokens))

figure, row = plt.subplots(
    1, len(chosen), figsize=(8, 4), sharey=True, layout="constrained"
)
for number, (axes, experts) in enumerate(zip(row, chosen, strict=True)):
    counts = np.zeros((len(KINDS), 8))
    np.add.at(counts, (np.array(kinds)[:, None], experts.reshape(-1, 2)), 1)
    shares = counts / counts.sum(1, keepdims=True)
    image = axes.imshow(shares, "Blues", vmin=0, vmax=0.5, aspect="auto")
    axes.set(title=f"layer {number}", xlabel="expert", xticks=range(8))
row[0].set_yticks(range(len(KINDS)), KINDS)
figure.colorbar(image, ax=row, label="share of the choices", extend="max")
plt.show()
