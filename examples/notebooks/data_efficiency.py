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
# # A context that grows
#
# [Open in Colab][colab]
#
# A small GPT learns Python's standard library, byte by byte, in three ways: plainly,
# from sequences that are short at first, and under an attention window that is narrow
# at first. You see the schedules before the runs, and then the loss against tokens and
# against wall time.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/data_efficiency.ipynb

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
import time

import jax
import matplotlib.pyplot as plt

import zjax
from zjax.run.reports import describe_schedule
from zjax.schedule.training import TrainingSchedule

# Two simulated devices on the CPU; on a machine with GPUs these are used instead.
jax.config.update("jax_num_cpu_devices", 2)
num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 120))

# %% [markdown]
# ## The ways
#
# `sequence_warmup` holds both. `truncate` cuts the end off each sequence, so a step is
# cheaper and trains on fewer tokens; each length is a program. `window` keeps all
# tokens and limits how far back each of them sees; one program runs all windows.

# %%
pacing = {"start": 32, "multiple": 32, "num_steps": max(1, num_steps // 2)}
run = {
    "num_steps": num_steps,
    "global_batch_size": 8,
    "precision": {"compute_dtype": "float32"},
    "model": {"num_layers": 2, "embed_size": 64, "num_heads": 2, "max_length": 128},
    "optimizer": {"schedule": {"num_warmup_steps": 1}, "peak_learning_rate": 0.002},
}
ways = {
    "plain": {},
    "truncate": {"sequence_warmup": {"kind": "truncate", "pacing": pacing}},
    "window": {"sequence_warmup": {"kind": "window", "pacing": pacing}},
}
configs = {name: zjax.load_config(run, settings) for name, settings in ways.items()}

# %% [markdown]
# ## Before you train
#
# `zjax plan --schedule` prints and draws what changes from step to step.

# %%
print(describe_schedule(TrainingSchedule(configs["truncate"])))

# %%
print(describe_schedule(TrainingSchedule(configs["window"])))

# %% [markdown]
# ## Train
#
# The learning rate decays with the tokens, so that all runs end at the same one.

# %%
curves = {}
for name, config in configs.items():
    model = zjax.make_model(config)
    made = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    state, tokens, points = made.state, TrainingSchedule(made.config).tokens, []
    place = made.batch_placement
    with zjax.make_loader(made.config, place, num_batches=num_steps) as batches:
        start = time.perf_counter()
        for step, batch in enumerate(batches, start=1):
            state, metrics = made.step(state, batch)
            loss = float(metrics["loss"])
            points.append((tokens.sum_until(step), time.perf_counter() - start, loss))
    curves[name] = points
    print(f"{name}: {tokens.sum_until(num_steps):,} tokens")

# %% [markdown]
# ## Loss against tokens, and against wall time
#
# So few steps of so small a model tell little about quality, and seconds contain the
# compilation of each program. On a CPU the window is a mask, which saves no time; on
# Hopper GPUs the kernels skip what is outside.

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 4), sharey=True, layout="constrained"
)
for name, points in curves.items():
    tokens, seconds, losses = zip(*points, strict=True)
    left.plot(tokens, losses, label=name, linewidth=1)
    right.plot(seconds, losses, linewidth=1)
left.set(xlabel="tokens", ylabel="loss of the batch (nats per byte)")
right.set_xlabel("seconds, with compilation")
left.legend()
plt.show()
