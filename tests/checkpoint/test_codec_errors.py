"""What a codec lost is saved with a run, for the same replicas and devices."""

import logging

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support import runs
from zjax.settings import schema


def make_run(number, *, stage=0, mesh=None, codec="onebit", **settings):
    return runs.make_small_run(
        optax.sgd(0.5),
        stage,
        num_devices=number,
        mesh=mesh or schema.Mesh(replica=number),
        communication=schema.Communication(codec=codec),
        **settings,
    )


@pytest.mark.parametrize("number", [4, 2])
def test_errors_are_kept_for_the_same_replicas_alone(number, tmp_path, caplog):
    """Fails if errors are lost, or given to replicas that did not make them."""
    first = make_run(4)
    _, state = runs.train(first, 2)
    zjax.save(tmp_path, state, first)
    with caplog.at_level(logging.WARNING):
        restored, _ = zjax.restore(tmp_path, make_run(number))
    told = [r.getMessage() for r in caplog.records if "codec" in r.getMessage()]
    for leaf, saved in zip(
        jax.tree.leaves(restored.extra), jax.tree.leaves(state.extra), strict=True
    ):
        expected = saved if number == 4 else np.zeros(leaf.shape, np.float32)
        np.testing.assert_array_equal(leaf, expected)
    text = "errors of the codec start at 0: none were saved for these messages"
    assert told == ([] if number == 4 else [text])
    assert np.abs(np.asarray(state.extra.worker)).max() > 0


TWO_LEVELS = schema.Mesh(replica=2, data=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 0},
        {"mesh": schema.Mesh(replica=2, data=1, tensor=2), "stage": 2},
        {"codec": "int8", "stage": 2},
    ],
    ids=["stage", "mesh", "codec"],
)
def test_errors_of_other_numbers_start_at_0(changes, tmp_path, caplog):
    """Fails if a buffer of the same size gives errors to other parameters."""
    first = make_run(4, stage=2, mesh=TWO_LEVELS)
    _, state = runs.train(first, 2)
    zjax.save(tmp_path, state, first)
    other = make_run(4, **({"mesh": TWO_LEVELS} | changes))
    with caplog.at_level(logging.WARNING):
        restored, _ = zjax.restore(tmp_path, other)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(restored.extra))
    assert "errors of the codec start at 0: none were saved for these" in caplog.text
