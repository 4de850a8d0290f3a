"""Both halves of a weight are of one number, however a GPU's compiler computes them."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.gpu import NEEDS_GPU
from tests.support.offload import (
    GPT,
    UNDER_BACKWARD,
    make_batch,
    make_config,
    start,
    weights_of,
)
from zjax.sharding import plan as plans

pytestmark = NEEDS_GPU
MODEL = dataclasses.replace(GPT, vocab_size=30_000, embed_size=256, mlp_size=1024)


def weights_after_two_steps(changes):
    changes = dict(changes)
    precision = changes.pop("precision", {}) | {"compute_dtype": "bfloat16"}
    run = start(make_config("pinned_host", model=MODEL, precision=precision, **changes))
    state = run.state
    for number in range(2):
        state, _ = run.step(state, make_batch(number, MODEL.vocab_size))
    return run.plan.splits_master, weights_of(state)


@pytest.mark.parametrize(
    "changes",
    [{}, UNDER_BACKWARD, {"zero": {"parameter_memory": "pinned_host"}}],
    ids=["clipped", "under the backward pass", "blocks on the host"],
)
def test_weights_in_halves_are_the_whole_ones(monkeypatch, changes):
    """Fails if a half is of another rounding than the other: that is worth 65,536."""
    in_halves, found = weights_after_two_steps(changes)
    monkeypatch.setattr(plans, "_split", lambda row, in_use: row)
    others_are, expected = weights_after_two_steps(changes)
    assert in_halves and not others_are
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = map(np.asarray, pair)
        far = np.abs(x.view(np.int32).astype(np.int64) - y.view(np.int32))
        assert np.max(far[np.sign(x) == np.sign(y)]) <= 4
