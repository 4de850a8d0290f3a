"""A tiny GPT learns as well under ZeRO++ as under ZeRO-3."""

import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.settings import schema

ROWS, LENGTH, STEPS = 16, 64, 500
ALL = ("secondary_partition", "quantized_weights", "quantized_gradients")


def read_text():
    """Bytes of modules of Python."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("a*.py")))
    return np.frombuffer(text, np.uint8).astype(np.int32)


def final_loss(features: Sequence[str]) -> float:
    """The mean loss of the last 50 steps."""
    settings: dict[str, Any] = dict.fromkeys(features, True)
    config = schema.Config(
        num_steps=STEPS,
        global_batch_size=ROWS,
        mesh=schema.Mesh(replica=2, data=4),
        zero=schema.Zero(stage=3, replicas=schema.Sharded(**settings)),
        precision=schema.Precision(compute_dtype="float32"),
        model=schema.Model(
            num_layers=2,
            embed_size=128,
            num_heads=4,
            vocab_size=257,
            max_length=LENGTH,
            attention=schema.Xla(),
        ),
        optimizer=schema.Optimizer(
            schedule=schema.Cosine(num_warmup_steps=20), peak_learning_rate=0.001
        ),
    )
    model = make_model(config)
    run = make_run(config, model, make_optimizer(config, model))
    state, text, losses = run.state, read_text(), []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        starts = rng.integers(0, len(text) - LENGTH - 1, ROWS)
        tokens = np.stack([text[start : start + LENGTH + 1] for start in starts])
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses[-50:]))


@pytest.mark.slow
def test_final_loss_is_that_of_zero_3():
    """Fails if int4 has blocks of 128 numbers: the loss is 1.1 % higher then."""
    expected = final_loss(())
    assert expected < 2
    assert final_loss(ALL) == pytest.approx(expected, rel=0.01)
