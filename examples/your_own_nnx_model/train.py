"""An NNX network with tied embeddings learns the Zen of Python letter by letter."""

import argparse
import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zjax

CONTEXT = 32


class Network(nnx.Module):
    """An ordinary NNX module; nothing in it knows of zjax."""

    def __init__(self, num_letters, width=256, *, rngs):
        self.embed = nnx.Embed(num_letters, 32, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.Linear(32 * CONTEXT, width, rngs=rngs),
                nnx.Linear(width, 32, rngs=rngs),
            ]
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, letters):
        x = self.embed(letters).reshape(len(letters), -1)
        x = self.dropout(nnx.gelu(self.layers[0](x)))
        return self.embed.attend(self.layers[1](x))


def loss_fn(model, batch, key):
    logits = model(batch["letters"]).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return loss.mean()


def read_text():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        import this  # noqa: F401 (it prints itself)
    return text.getvalue()


def make_batch(codes, seed, size=256):
    starts = np.random.default_rng(seed).integers(len(codes) - CONTEXT, size=size)
    windows = codes[starts[:, None] + np.arange(CONTEXT + 1)]
    return {"letters": windows[:, :-1], "next": windows[:, -1]}


def write(model, prompt, alphabet, num_letters):
    """Appends the likeliest letter, again and again."""
    call = nnx.jit(lambda model, letters: model(letters).argmax(-1)[0])
    text = prompt
    for _ in range(num_letters):
        letters = np.array([[alphabet.index(c) for c in text[-CONTEXT:]]])
        text += alphabet[int(call(model, letters))]
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    num_steps = parser.parse_args().steps

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    text = read_text()
    alphabet = sorted(set(text))
    codes = np.array([alphabet.index(c) for c in text], np.int32)

    run = zjax.initialize(
        lambda rngs: Network(len(alphabet), rngs=rngs),
        optax.adamw(3e-3),
        loss_fn,
        make_batch(codes, 0),
        {"zero": {"stage": 3, "min_shard_elements": 1024}},
    )
    print(zjax.describe_plan(run.plan))

    state = run.state
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(codes, step))
        if step % 100 == 0:
            print(f"step {step}: loss {metrics['loss']:.3f}")
    print(write(run.bind(state), text[:CONTEXT], alphabet, 180))


if __name__ == "__main__":
    main()
