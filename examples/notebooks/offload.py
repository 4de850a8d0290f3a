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
# # Fine-tuning a model that is too large for the card
#
# [Open in Colab][colab]
#
# Adam keeps 12 bytes for each parameter besides the model itself: a GPT of 1.4 billion
# parameters needs 23 GB, and a T4 has 16. Here what the card has no room for stays in
# the memory of the host or on a disk, and comes up group by group for its update. The
# steps compute the same numbers as if everything were on the card.
#
# Choose a runtime with a GPU. Without one the notebook takes a tiny model.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/offload.ipynb

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
import tempfile
import warnings

import jax
import matplotlib.pyplot as plt

import zjax
from zjax.checkpoint.export import export_safetensors
from zjax.data.prepare import prepare
from zjax.estimate import tables
from zjax.sharding import memory

num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 60))
os.chdir(tempfile.mkdtemp())
warnings.filterwarnings("ignore", message="install .ipywidgets.")
device = jax.devices()[0]
capacity = (device.memory_stats() or {}).get("bytes_limit", 0)
half = "float16"
if float(getattr(device, "compute_capability", 0)) >= 8:
    half = "bfloat16"
print(device.device_kind, f"{capacity / 1e9:.0f} GB" if capacity else "")

# %% [markdown]
# ## A model that does not fit
#
# The first of these whose weights, gradients and Adam state exceed the card, 16 bytes
# for each parameter.

# %%
SHAPES = ((24, 2048, 16), (32, 2560, 32), (32, 4096, 32), (40, 5120, 40))
layers, width, heads = next(
    (shape for shape in SHAPES if 16 * 12 * shape[0] * shape[1] ** 2 > capacity),
    SHAPES[-1],
)
if not capacity:
    layers, width, heads = 2, 256, 4  # a laptop has no card to fill
num_params = 12 * layers * width**2
print(f"{layers} layers of width {width}: {num_params / 1e6:,.1f} M parameters")

# %% [markdown]
# ## Text
#
# A model is first trained a little on Python's standard library, then fine-tuned on one
# package of it. To fine-tune your own, set `weights` to a file that `zjax export`
# wrote, and the model's shape to its shape.

# %%
weights = ""
email = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "email"
text = pathlib.Path("email.txt")
text.write_text("\n".join(f.read_text() for f in sorted(email.glob("*.py"))))
prepare([text], "tokens", validation_fraction=0.1)


# %% [markdown]
# ## One setting
#
# `zero.offload="auto"` fills what the step leaves of the card, then the host,
# then the disks of `zero.offload.nvme_paths`.


# %%
def make_config(name, **data):
    return zjax.load_config(
        {
            "directory": name,
            "num_steps": num_steps,
            "global_batch_size": 4 * jax.device_count(),
            "zero": {
                "stage": 2,
                "offload": {
                    "kind": "auto" if capacity else "pinned_host",
                    "nvme_paths": (os.getcwd(),) if capacity else (),
                },
            },
            "precision": {"compute_dtype": half if capacity else "float32"},
            "model": {
                "num_layers": layers,
                "embed_size": width,
                "num_heads": heads,
                "vocab_size": 257,
                "max_length": 256,
                "remat": "full",
            },
            "data": data,
            "optimizer": {
                "schedule": {"num_warmup_steps": 2},
                "peak_learning_rate": 0.0003,
            },
            "checkpoint": {"every_steps": 0, "init_from": weights},
            "observe": {"sinks": ("jsonl",), "plot": False, "log_every_steps": 1},
        }
    )


if not weights:
    first = zjax.Trainer(make_config("first"))
    first.fit()
    weights = "weights.safetensors"
    export_safetensors(first.store, weights)
    first.close()
    del first

tuned = zjax.Trainer(make_config("tuned", source="tokens", path="tokens"))
print(tables.describe_memories(tuned.run.plan, tuned.config))

# %% [markdown]
# ## Where everything is
#
# What rests on the card between steps, and what elsewhere.

# %%
plan = tuned.run.plan
sizes = [size / 1e6 for size in memory.stored_bytes(plan)]
plt.figure(figsize=(5, 2.2))
plt.barh(["card", "host", "disk"], sizes)
if capacity:
    plt.axvline(capacity / 1e6, color="black", linestyle="--", label="the card")
    plt.legend()
plt.xlabel("MB")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Fine-tune

# %%
tuned.fit()
peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
print(f"most on the card: {peak / 1e9:.1f} GB" if peak else "a CPU tells no peak")
print(tuned.generate("def ", max_new_tokens=60))
tuned.close()
