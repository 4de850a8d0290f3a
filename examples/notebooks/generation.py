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
# # Write text with a small language model
#
# [Open in Colab][colab]
#
# A small GPT learns Python's standard library, byte by byte. A `zjax.Generator` then
# writes with it: the most likely text, drawn texts, several texts of one prompt, a text
# as it comes, and how sure the model was. At the end you see why a generator takes many
# texts at once, and ask a server of your own by the `openai` client.
#
# [colab]: https://colab.research.google.com/github/zjax-project/zjax/blob/main/examples/notebooks/generation.ipynb

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
import logging
import os
import statistics
import tempfile
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

import zjax

num_steps = int(os.environ.get("ZJAX_EXAMPLE_STEPS", 400))
print(jax.devices()[0].device_kind)

# %% [markdown]
# ## A model that knows a little Python
#
# The settings are those of any run. Text is bytes here, so that nothing is downloaded.

# %%
trainer = zjax.Trainer(
    {
        "directory": tempfile.mkdtemp(),
        "num_steps": num_steps,
        "global_batch_size": 16,
        "precision": {"compute_dtype": "float32"},
        "model": {"num_layers": 3, "embed_size": 96, "num_heads": 3, "max_length": 256},
        "data": {"source": "standard_library", "length": 128},
        "optimizer": {
            "peak_learning_rate": 4e-3,
            "schedule": {"num_warmup_steps": min(20, num_steps)},
        },
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "observe": {"sinks": [], "plot": False},
    }
)
trainer.fit()
loss = trainer.evaluate()["eval_loss"]
print(f"loss on unseen code after {num_steps} steps: {loss:.2f} nats a byte")

# %% [markdown]
# ## A generator
#
# A generator takes the run with a state, and lays the weights out for writing. It then
# waits in a thread for requests. `max_rows` is the number of texts that are written at
# once. Greedy text takes the most likely byte at each place; it is the same each time.

# %%
generator = zjax.Generator(trainer.run, trainer.state, max_rows=32)
greedy = zjax.Sampling(max_new_tokens=60)
[text] = generator.generate(["if self."], greedy)
print("if self." + text.text)
print("greedy text ended by:", text.finish_reason)

# %% [markdown]
# ## Drawn texts
#
# A temperature draws each byte by its probability; `top_p` leaves out what is unlikely.
# `num_samples` writes several texts of one prompt, whose keys are stored once. The seed
# decides each of them: the same seed gives the same texts, whatever else is written
# beside them.

# %%
drawn = zjax.Sampling(
    max_new_tokens=60, temperature=0.8, top_p=0.95, num_samples=3, seed=1
)
texts = generator.generate(["import ", "class "], drawn)
for text in texts:
    print(f"--- prompt {text.prompt}, sample {text.sample}")
    print(text.text)
again = generator.generate(["class "], drawn)
print("again the same:", [x.text for x in again] == [x.text for x in texts[3:]])

# %% [markdown]
# ## Until a string comes
#
# A stop string ends a text, and is not a part of it. Here a text ends with its line.

# %%
one_line = zjax.Sampling(max_new_tokens=80, temperature=0.6, stop=("\n",), seed=2)
for text in generator.generate(["if ", "return ", "for "], one_line):
    print(repr(text.text), text.finish_reason)

# %% [markdown]
# ## As it comes
#
# `stream` yields what is new as soon as it is written, which is what a chat shows.

# %%
pieces = []
for delta in generator.stream("return ", drawn):
    pieces.append(delta.text)
print(f"{len(pieces)} pieces of three texts, the first five: {pieces[:5]}")

# %% [markdown]
# ## How sure the model was
#
# `num_logprobs=3` asks for the logarithm of each byte's probability, and for the three
# most likely bytes at each place. A name is hard to guess at its beginning and easy at
# its end.

# %%
sure = zjax.Sampling(max_new_tokens=40, num_logprobs=3)
[text] = generator.generate(["import os\nimport "], sure)
assert text.logprobs is not None
probabilities = np.exp(text.logprobs)
labels = [repr(bytes([x]).decode("latin-1"))[1:-1] for x in text.ids]
plt.figure(figsize=(10, 3), layout="constrained")
plt.bar(range(len(labels)), probabilities)
plt.xticks(range(len(labels)), labels)
plt.xlabel("byte that was written")
plt.ylabel("probability")
plt.show()

# %% [markdown]
# ## Many texts at once
#
# A token of one text reads all weights of the model. A token of each of 32 texts reads
# the same weights once: the texts share the way to the memory. So all texts together
# get far more tokens per second, and each single one is hardly slower, until the device
# has as much to compute as to read. (A CPU gets there early.)


# %%
def speed(num_rows):
    rng = np.random.default_rng(num_rows)
    seconds = []
    for _ in range(4):
        prompts = rng.integers(256, size=(num_rows, 16)).tolist()
        start = time.perf_counter()
        generator.generate(prompts, zjax.Sampling(max_new_tokens=48, end_ids=()))
        seconds.append(time.perf_counter() - start)
    return 48 * num_rows / statistics.median(seconds[1:])


counts = (1, 2, 4, 8, 16, 32)
speeds = [speed(number) for number in counts]
plt.figure(figsize=(6, 3.5), layout="constrained")
plt.loglog(counts, speeds, marker="o", label="all texts")
each = [x / n for x, n in zip(speeds, counts, strict=True)]
plt.loglog(counts, each, marker="o", label="each text")
plt.xticks(counts, [str(x) for x in counts])
plt.xlabel("texts at once")
plt.ylabel("new tokens per second")
plt.legend()
plt.show()

# %% [markdown]
# `zjax plan --generate` says beforehand how fast the memory of a device lets a model
# write, and `zjax bench --generate` measures it:
#
#     zjax plan --generate --config=llama_8b --num_devices=1 --device=H200
#     zjax bench --generate --config=llama_8b --rows=1,16,64
#
# ## A server
#
# `zjax serve` answers OpenAI's API with such a generator. In a program, `serving` does
# so in a thread; port 0 is any free port of this machine. The client below could be any
# program that knows the API. (It needs `pip install 'zjax[serve]' openai`.)

# %%
import openai

from zjax.serve import Settings, serving

for name in ("httpx", "uvicorn.access"):
    logging.getLogger(name).setLevel(logging.WARNING)
with (
    serving(generator, Settings(port=0, served_name="tiny")) as address,
    openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
):
    reply = client.completions.create(
        model="tiny", prompt="def ", max_tokens=40, temperature=0.8, seed=1
    )
    print(reply.choices[0].text)
    print(f"the server wrote {reply.usage.completion_tokens} tokens")

# %%
generator.close()
trainer.close()
