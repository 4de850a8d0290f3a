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
# # Training over a slow link
#
# [Open in Colab][colab]
#
# Four copies of a small GPT learn Python's standard library, byte by byte. Each copy
# has its own rows, and the copies must agree on the weights: that takes a link between
# them. Four methods use it less and less. At the end you see what each sends, how well
# it learns, and how long it would take on a link that is really slow.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/communication.ipynb

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
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

import zjax
from zjax.estimate.link_speed import parse_speed, report_link
from zjax.estimate.methods import sent_per_step

# Four simulated devices on the CPU; on a machine with GPUs these are used instead.
jax.config.update("jax_num_cpu_devices", 4)
num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 200))

# %% [markdown]
# ## The methods
#
# A method is a few settings of one and the same run. `mesh.replica=-1` makes each
# device a copy.
#
# - **Adam in bfloat16** averages gradients in every step.
# - **1-bit Adam** does so for the first 15 % of the steps. Then it sends the signs of
#   its momentum, and what they lose is added to the next message.
# - **DiLoCo** lets copies train alone, here for ten steps, and averages how far they
#   came.
# - **Streaming DiLoCo** sends half of the layers at a time in four bits per number, and
#   goes on training while they are on their way.

# %%
round_steps = min(10, num_steps)
run = {
    "num_steps": num_steps,
    "global_batch_size": 16,
    "mesh": {"replica": -1, "data": 1},
    "precision": {"compute_dtype": "float32"},
    "model": {
        "num_layers": 2,
        "embed_size": 64,
        "num_heads": 4,
        "max_length": 64,
    },
    "optimizer": {
        "schedule": {"kind": "constant", "num_warmup_steps": min(20, num_steps)},
        "peak_learning_rate": 0.002,
    },
    "evaluation": {"every_steps": 0, "num_batches": 0},
}
methods = {
    "Adam, bfloat16": {"communication": {"codec": "bfloat16"}},
    "1-bit Adam": {"optimizer": {"rule": "onebit_adam"}},
    "DiLoCo": {"communication": {"local_steps": {"num_steps": round_steps}}},
    "Streaming DiLoCo": {
        "communication": {
            "codec": "int4",
            "local_steps": {
                "num_steps": round_steps,
                "num_fragments": 2,
                "delay": max(0, round_steps // 2 - 2),
                "mixing": 0.5,
            },
        }
    },
}

# %% [markdown]
# ## Train
#
# The loss of each step is the mean over the copies that wait for each other; of local
# steps it is that of the first copy, so that its line is less even.

# %%
losses, sent = {}, {}
with tempfile.TemporaryDirectory() as directory:
    for name, settings in methods.items():
        own = {"directory": f"{directory}/{len(losses)}"}
        trainer = zjax.Trainer(zjax.load_config(run, settings, own))
        state, losses[name] = trainer.run.state, []
        for _ in range(num_steps):
            state, metrics = trainer.run.step(state, next(trainer.loader))
            losses[name].append(float(metrics["loss"]))
        sent[name] = sent_per_step(trainer.run.plan, trainer.config)
        trainer.close()
        print(f"{name}: one copy sends {sent[name] / 1e3:.1f} kB in a mean step")

# %% [markdown]
# ## Loss against steps, and against time
#
# All methods learn from the same number of rows, and in so few steps those that send
# less are behind. On the right a step takes 20 ms, and then the bytes of a copy at
# 10 Mbit/s: now they are ahead.

# %%
link, step_seconds = parse_speed("10mbps"), 0.02
window = min(20, num_steps)
mean = np.ones(window) / window
figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 4), sharey=True, layout="constrained"
)
for name, values in losses.items():
    smooth = np.convolve(values, mean, mode="valid")
    steps = np.arange(window, num_steps + 1)
    left.plot(steps, smooth, label=name)
    right.plot(steps * (step_seconds + sent[name] / link), smooth, label=name)
left.set(xlabel="step", ylabel="loss, mean of 20 steps")
right.set(xlabel="seconds on a link of 10 Mbit/s", xscale="log")
left.legend()
plt.show()

# %% [markdown]
# ## What a step sends
#
# One bit is a sixteenth of bfloat16, but the warm-up is sent in full. Local steps send
# nothing, which divides what is left by their number.

# %%
plt.figure(figsize=(6, 3), layout="constrained")
plt.barh(list(sent), [x / 1e3 for x in sent.values()])
plt.gca().invert_yaxis()
plt.xscale("log")
plt.xlabel("kB that one copy sends in a mean step")
plt.show()

# %% [markdown]
# ## Before you train
#
# `zjax plan --link=1gbps` predicts this for any config without training: here for GPT-2
# with 124 million parameters on two nodes of four H100s.

# %%
model = {"vocab_size": 50_257, "max_length": 1024}  # the rest is that of GPT-2
gpt2 = {"global_batch_size": 32, "mesh": {"replica": 2}, "model": model}
peak = {"observe": {"peak_tflops": 989.4}}
print(report_link(zjax.load_config(gpt2, peak), 8, "1gbps"))
