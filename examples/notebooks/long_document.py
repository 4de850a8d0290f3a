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
# # Long documents: attention over a few blocks
#
# [Open in Colab][colab]
#
# Dense attention scores every pair of tokens: twice the length, four times the work.
# Here a token sees a few blocks of the others, and the work grows with the length. The
# kernels need a Hopper GPU; other devices run the same blocks in plain JAX.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/long_document.ipynb

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
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import zjax
import zjax_kernels

num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 60))
device = jax.devices()[0]
has_gpu = device.platform == "gpu"
print(device.device_kind)

# %% [markdown]
# ## Six layouts
#
# A colored block lives: its queries see its keys. A decoder takes the same rules with
# `attention="unidirectional"`, which drops what lies above the diagonal.

# %%
PATTERNS = (
    zjax_kernels.Dense(4, block=64),
    zjax_kernels.Fixed(4, block=64),
    zjax_kernels.Variable(4, block=64, local_window_blocks=(2, 4, 8)),
    zjax_kernels.BigBird(4, block=64),
    zjax_kernels.BSLongformer(4, block=64, global_block_indices=(0, 16)),
    zjax_kernels.LocalSlidingWindow(4, block=64),
)
figure, grid = plt.subplots(2, 3, figsize=(11, 7.5), layout="constrained")
for pattern, axes in zip(PATTERNS, grid.flat, strict=True):
    layout = pattern.layout(2_048)
    zjax_kernels.plot_layout(layout, axes=axes)
    axes.set_title(f"{type(pattern).__name__}: {layout.density:.0%} of the blocks")
plt.show()

# %% [markdown]
# ## What is computed
#
# A plan gathers live blocks (dark) into tiles of 128 queries and chunks of 128 keys.
# What a tile computes besides them (light) is masked and changes nothing. The smaller
# the blocks, the more of it there is; the titles say which part of the work is live.


# %%
def count_visits(plan):
    """How often the forward pass computes each pair of units of tokens."""
    work = plan.queries
    shape = work.num_rows // work.row_unit, work.num_columns // work.column_unit
    visits = np.zeros(shape, int)
    for tile, first, count, *_ in work.items[0, : work.num_items[0]]:
        columns = work.columns[first : first + count].ravel()
        np.add.at(visits, np.ix_(work.rows[0, tile], columns), 1)
    return visits


figure, row = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for block, axes in zip((16, 32, 64), row, strict=True):
    layout = zjax_kernels.BigBird(4, block=block).layout(2_048)
    visits, live = count_visits(zjax_kernels.make_plan(layout)), layout.to_dense()[0]
    for cells, color in ((visits > 0, 0.3), (live, 1.0)):
        shades = np.where(cells, color, np.nan)
        axes.imshow(shades, "Blues", vmin=0, vmax=1, extent=(0, 2_048, 2_048, 0))
    share = live.mean() / (visits.sum() / visits.size)
    axes.set_title(f"blocks of {block}: {share:.0%} lives")
plt.show()

# %% [markdown]
# ## Time against length
#
# One forward and backward pass of two heads, on the device that the title names. Dense
# attention is `jax.nn.dot_product_attention` as it comes, whose memory grows with the
# square of the length; it stops earlier.


# %%
def seconds(attend, length):
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.float16 if has_gpu else jnp.float32
    args = [jax.random.normal(key, (1, length, 2, 64), dtype) for key in keys]
    step = jax.jit(jax.grad(lambda *args: attend(*args).sum(), argnums=(0, 1, 2)))
    jax.block_until_ready(step(*args))  # compiles
    times = []
    for _ in range(5 if has_gpu else 2):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def sparse(length):
    layout = zjax_kernels.BigBird(2, block=64).layout(length)
    plan = zjax_kernels.make_plan(layout, head_size=64)
    return seconds(lambda *args: zjax_kernels.sparse_attention(*args, plan), length)


def dense(length):
    return seconds(jax.nn.dot_product_attention, length)


longest = 8_192 if has_gpu else 4_096
lengths = [longest // 8, longest // 4, longest // 2, longest, 2 * longest]
plt.figure(figsize=(6, 4))
plt.loglog(lengths, [sparse(n) for n in lengths], "o-", label="BigBird, blocks of 64")
plt.loglog(lengths[:-1], [dense(n) for n in lengths[:-1]], "s-", label="dense")
plt.xticks(lengths, [f"{n:,}" for n in lengths])
plt.minorticks_off()
plt.xlabel("tokens")
plt.ylabel("seconds")
plt.title(f"forward and backward on {device.device_kind}")
plt.legend()
plt.show()

# %% [markdown]
# ## Train on long texts
#
# The same small decoder on Python's standard library, 2,048 bytes a text, with all
# pairs and with BigBird's blocks. `examples/long_document` takes 16,384 and 65,536.

# %%
library = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
text = b"".join(file.read_bytes() for file in sorted(library))
text = np.frombuffer(text, np.uint8).astype(np.int32)


def make_batch(seed):
    size = jax.device_count()
    starts = np.random.default_rng(seed).integers(len(text) - 2_048, size=size)
    windows = text[starts[:, None] + np.arange(2_049)]
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def train(attention):
    config = zjax.load_config(
        {
            "num_steps": num_steps,
            "model": {
                "num_layers": 2,
                "embed_size": 128,
                "num_heads": 2,
                "max_length": 2_048,
            },
            "optimizer": {
                "schedule": {"num_warmup_steps": num_steps // 10},
                "peak_learning_rate": 0.003,
            },
        },
        {"model": attention},
    )
    model = zjax.make_model(config)
    run = zjax.initialize(model, None, None, make_batch(0), config)
    state, losses = run.state, []
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(step))
        losses.append(float(metrics["loss"]))
    return losses


bigbird = {"attention": {"kind": "sparse", "pattern": "bigbird"}}
plt.figure(figsize=(6, 4))
plt.plot(train({"attention": "auto"}), label="all pairs")
plt.plot(train(bigbird), label="BigBird, blocks of 64")
plt.xlabel("step")
plt.ylabel("loss, nats per byte")
plt.legend()
plt.show()
