"""A Linen network with dropout learns to tell two spirals apart, under ZeRO stage 2."""

import argparse

import flax.linen as nn
import jax
import numpy as np
import optax

import zjax


class Network(nn.Module):
    """An ordinary Linen module; nothing in it knows of zjax."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(3):
            x = nn.gelu(nn.Dense(128)(x))
            x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(2)(x)


def loss_fn(model, batch, key):
    logits = model(batch["point"], train=model.train)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    num_steps = parser.parse_args().steps

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    config = {"zero": {"stage": 2, "min_shard_elements": 1024}}
    run = zjax.initialize(Network(), optax.adamw(3e-3), loss_fn, make_batch(0), config)
    print(zjax.describe_plan(run.plan))

    state = run.state
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(step))
        if step % 100 == 0:
            print(f"step {step}: loss {metrics['loss']:.3f}")
    metrics = run.evaluate(state, make_batch(seed=10**6, size=4096))
    print(f"accuracy on new points: {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
