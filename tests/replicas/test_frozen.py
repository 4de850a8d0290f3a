"""Frozen weights stay and all others learn, whatever replicas exchange."""

import re

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.replicas.state import Outer

LORA, NOT_LORA = "lora.rank=2", "^(?!.*/lora/)"
FROZEN = "^embedding|^blocks/mlp"
GROUPS = {"optimizer": {"groups": ({"pattern": FROZEN, "learning_rate_scale": 0},)}}
ROUNDS = (
    "communication.local_steps.num_steps=3",
    "communication.local_steps.num_synchronous_steps=2",
)


@pytest.mark.parametrize("codec", ["onebit", "int8"])
@pytest.mark.parametrize(
    ("settings", "frozen"),
    [((LORA,), NOT_LORA), ((GROUPS, *ROUNDS), FROZEN)],
    ids=["every step", "rounds after synchronous steps"],
)
def test_frozen_weights_stay_and_others_learn(settings, frozen, codec, tmp_path):
    """Fails if a message, an outer step or a merge moves a frozen weight.

    After the last step, which ends with an exchange, replicas have one set of weights.
    """
    settings = "mesh.replica=2", f"communication.codec={codec}", *settings
    trainer = small_run.make_trainer(tmp_path, *settings, num_devices=2)
    run, state = trainer.run, trainer.run.state
    paths = [row.path for row in jax.tree.leaves(run.plan.master)]
    before = [np.asarray(x) for x in jax.tree.leaves(state.master)]
    batch = next(iter(trainer.loader))
    for _ in range(run.config.num_steps):
        state, _ = run.step(state, batch)
    after = [np.asarray(x) for x in jax.tree.leaves(state.master)]
    copies = after
    if isinstance(state.extra, Outer):
        copies = [np.asarray(x) for x in jax.tree.leaves(state.extra.replicas.master)]
    learned = set()
    for path, first, last, copy in zip(paths, before, after, copies, strict=True):
        np.testing.assert_array_equal(copy, np.broadcast_to(last, copy.shape))
        learned |= {path} if (first != last).any() else set()
    assert learned == {path for path in paths if not re.search(frozen, path)}
