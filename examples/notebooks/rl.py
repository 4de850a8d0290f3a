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
# # Learn from rewards
#
# [Open in Colab][colab]
#
# A small decoder imitates a teacher who reverses words, and often errs. A function then
# rewards the texts that are right, and GRPO learns from eight texts of each prompt. At
# the end the model is right more often than its teacher, on words of a range that it
# has never seen together.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/rl.ipynb

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
import json
import os
import pathlib
import random
import tempfile

import jax
import matplotlib.pyplot as plt

import zjax
from zjax.data.prepare import prepare
from zjax.rl import Trainer
from zjax.rl.tasks import reverse

num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 700))
num_rl_steps = min(num_steps, 30)
folder = pathlib.Path(tempfile.mkdtemp())
print(jax.devices()[0].device_kind)

# %% [markdown]
# ## A task with a verifier
#
# A row is a prompt with what the verifier needs. A trace is a solution, which reverses
# each word before the answer; the last line counts.

# %%
[row] = reverse.rows(1)
print(row)
print(reverse.trace(row))
print("reward:", reverse.reward(completion=reverse.trace(row), **row))

# %% [markdown]
# ## A teacher that errs
#
# In 65 % of its traces the teacher goes on, from a random line, with the solution of
# another prompt. Imitation can be no better than that.


# %%
def teach(row, other, draws):
    lines, others = (reverse.trace(x).split("\n") for x in (row, other))
    place = draws.randrange(len(lines)) if draws.random() < 0.65 else len(lines)
    return "\n".join(lines[:place] + others[place:])


draws, num_traces = random.Random(0), 20_000
pairs = zip(reverse.rows(num_traces), reverse.rows(num_traces, seed=3), strict=True)
with (folder / "traces.jsonl").open("w") as file:
    for row, other in pairs:
        trace = {"prompt": row["prompt"], "completion": teach(row, other, draws)}
        file.write(json.dumps(trace) + "\n")
_ = prepare([folder / "traces.jsonl"], folder / "traces", examples="completions")

# %% [markdown]
# ## The supervised start
#
# Only completions have a loss; the texts are bytes, so nothing is downloaded.

# %%
settings = {
    "directory": str(folder / "supervised"),
    "num_steps": num_steps,
    "global_batch_size": 32,
    "precision": {"compute_dtype": "float32"},
    "model": {
        "num_layers": 2,
        "embed_size": 64,
        "num_heads": 4,
        "max_length": 64,
        "vocab_size": 257,
    },
    "data": {
        "source": "tokens",
        "path": str(folder / "traces"),
        "packing": "documents",
    },
    "optimizer": {
        "peak_learning_rate": 2e-3,
        "schedule": {"num_warmup_steps": min(50, num_steps)},
    },
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "observe": {"sinks": [], "plot": False, "log_every_steps": 200},
}
start = zjax.Trainer(settings)
start.fit()
start.close()

# %% [markdown]
# ## GRPO
#
# A step draws eight texts of each of 16 prompts, compares their rewards, and makes what
# was rewarded more likely. The trainer draws with the weights that it trains: there is
# no second engine. Held-out prompts have two words of a range of which prompts for
# training have one at most.

# %%
rewards = {}


def note(step, values):
    if "reward" in values:
        rewards[step] = values["reward"]


trainer = Trainer(
    zjax.load_config(
        settings,
        {
            "directory": str(folder / "grpo"),
            "num_steps": num_rl_steps,
            "global_batch_size": 0,
            "checkpoint.init_from": str(folder / "supervised"),
            "optimizer.peak_learning_rate": 1e-3,
            "optimizer.schedule.num_warmup_steps": min(5, num_rl_steps),
            "optimizer.weight_decay": 0.0,
            "evaluation.num_batches": 1,
            "observe.log_every_steps": 1,
            "rl.objective": "grpo",
            "rl.rewards": [{"function": "zjax.rl.tasks.reverse:reward"}],
            "rl.rollout.num_prompts": 16,
            "rl.rollout.num_samples": 8,
            "rl.rollout.max_new_tokens": 32,
            "rl.evaluation_samples": 8,
        },
    ),
    prompts=reverse.rows(2_000, seed=1),
    evaluation_prompts=reverse.rows(16, seed=2, held_out=True),
    callbacks=[note],
)
before = trainer.evaluate()
trainer.fit()
after = trainer.evaluate()
for name, found in (("supervised start", before), ("GRPO", after)):
    rates = (
        f"pass@1 {found['eval_pass_at_1']:.0%}, pass@8 {found['eval_pass_at_k']:.0%}"
    )
    print(f"{name}: {rates} of held-out prompts")

# %%
plt.figure(figsize=(6, 3.5), layout="constrained")
plt.plot(list(rewards), list(rewards.values()), marker=".")
plt.axhline(0.35, color="gray", linestyle="--", label="the teacher")
plt.xlabel("step of GRPO")
plt.ylabel("share of right texts")
plt.legend()
plt.show()

# %% [markdown]
# ## What it writes now

# %%
prompts = [row["prompt"] for row in reverse.rows(3, seed=2, held_out=True)]
with zjax.Generator(trainer.run, trainer.state) as generator:
    for text in generator.generate(prompts, zjax.Sampling(max_new_tokens=32)):
        print(prompts[text.prompt] + text.text, end="\n\n")
trainer.close()

# %% [markdown]
# `zjax rl` does the same from a config and files; `rl.objective` names another method,
# and `zjax.rl` has its parts as functions of arrays.
