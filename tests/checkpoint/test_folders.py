"""A checkpoint may hold a second model, in a folder of names."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.checkpoint import states
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.weights.saved import CRITIC


@dataclasses.dataclass
class Both:
    """A store of two states, the second in the folder."""

    store: Store
    values: tuple
    rows: tuple


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    values = states.make_values(), states.make_values(width=4)
    # As split master weights are: low bits beside high bits of equal shape.
    for each in values:
        bits = each["master"]["embed"].view(np.int32)
        each["master"]["embed"] = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        high = (bits >> 16).astype(np.uint16).view(jax.numpy.bfloat16)
        each["params"] = {"embed": high}
    rows = tuple(map(states.make_rows, values))
    placed = [states.place(*pair) for pair in zip(values, rows, strict=True)]
    store = Store(str(tmp_path_factory.mktemp("both")))
    state, plans = (x | {CRITIC: y} for x, y in (placed, rows))
    store.save(1, state, plans, extra={})
    store.close()
    return Both(store, values, rows)


def test_both_are_restored_apart(both):
    """Fails if names meet, or the halves of a split weight are joined across models."""
    first, _ = both.store.restore(both.rows[0], select=lambda x: x.outside(CRITIC))
    second, _ = both.store.restore(both.rows[1], select=lambda x: x.part(CRITIC))
    states.assert_same(first, both.values[0], both.rows[0])
    states.assert_same(second, both.values[1], both.rows[1])


def test_a_second_model_is_not_left_out_in_silence(both):
    with pytest.raises(CheckpointError, match=f"{CRITIC}/"):
        both.store.restore(both.rows[0])
