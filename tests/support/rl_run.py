"""A policy small enough to learn from its own texts in a test."""

import contextlib
import io

import jax

from tests.support import small_run
from zjax.config import load_config
from zjax.rl.trainer import Trainer

PROMPTS = [{"prompt": text, "letter": text[-1]} for text in ("ab", "cd e", "f")]
SETTINGS = {
    "num_steps": 3,
    "zero": {"stage": 1, "min_shard_elements": 64},
    "precision": {"compute_dtype": "float32"},
    "optimizer": {
        "schedule": {"num_warmup_steps": 0},
        "peak_learning_rate": 1e-2,
    },
    "model": {
        "num_layers": 1,
        "embed_size": 16,
        "mlp_size": 32,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_length": 16,
    },
    "data": {"source": "standard_library"},
    "evaluation": {"every_steps": 0, "num_batches": 0},
    "checkpoint": {"every_steps": 0},
    "observe": {"sinks": ("jsonl",), "log_every_steps": 1, "plot": False},
    "rl": {
        "rollout": {"num_prompts": 2, "num_samples": 4, "max_new_tokens": 6},
        "rewards": [{"function": "tests.support.rl_rewards:plain"}],
        "reward_processes": 1,
    },
}


def make_trainer(directory, *overrides, num_devices=8, **given):
    config = load_config(SETTINGS, {"directory": str(directory)}, *overrides)
    given = {"prompts": PROMPTS} | given
    return Trainer(config, devices=jax.devices()[:num_devices], **given)


def fit(directory, *overrides, **given):
    trainer = make_trainer(directory, *overrides, **given)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit()
    trainer.close()
    return trainer


records = small_run.records
