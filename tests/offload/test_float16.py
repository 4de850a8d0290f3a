"""The loss scale of float16 where the state rests elsewhere."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import zjax
from tests.support.offload import in_memory
from tests.support.trees import assert_close
from zjax.sharding import plan as plans

STEPS = 8


class Perceptron(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(32, dtype=jnp.float16)(x))
        return linen.Dense(1, dtype=jnp.float16)(hidden)


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def make_batch(step):
    rng = np.random.default_rng(step)
    x, y = (rng.standard_normal((16, size)) for size in (24, 1))
    return {"x": np.float32(x), "y": np.float32(y)}


def train(memory, paths=()):
    """Weights, their average, and the loss scale of every step."""
    config = {
        "zero": {
            "stage": 2,
            "min_shard_elements": 0,
            "offload": memory and {"kind": memory, "nvme_paths": paths},
        },
        "num_microbatches": 2,
        "precision": {
            "compute_dtype": "float16",
            "loss_scale": {"initial": 2.0**18, "window": 2, "hysteresis": 1},
        },
        "optimizer": {"ema_decay": 0.9},
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    run = zjax.initialize(Perceptron(), tx, loss_fn, make_batch(0), config)
    state, found = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, make_batch(step))
        found.append({name: float(x) for name, x in metrics.items()})
    return in_memory((state.master, state.ema)), found


@pytest.mark.parametrize("memory", ["pinned_host", "nvme"])
def test_steps_that_overflow_change_nothing(memory, monkeypatch, tmp_path):
    """Fails if the scale differs, or a step that is skipped moves a weight."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    paths = (str(tmp_path),) if memory == "nvme" else ()
    (weights, found), (expected, told) = train(memory, paths), train(None)
    scales = [metrics["loss_scale"] for metrics in told]
    assert min(scales) < scales[0] and max(scales[2:]) > min(scales)
    assert [metrics["loss_scale"] for metrics in found] == scales
    assert found[-1]["skipped_steps"] == told[-1]["skipped_steps"] > 0
    assert_close(weights, expected, atol=2e-4)
