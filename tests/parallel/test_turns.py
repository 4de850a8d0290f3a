"""What is due in some ticks alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.parallel.schedule import IDLE, make_schedule
from zjax.parallel.turns import make_turns, where_due


@pytest.mark.parametrize(
    ("ticks", "operations"),
    [((3, 4), {"mul", "max"}), ((IDLE, IDLE), {"cond"}), ((3, IDLE), {"cond"})],
)
def test_what_is_due_in_all_ticks_needs_no_condition(ticks, operations):
    def run(number, total):
        return where_due(np.array(ticks), number, lambda n, x: n * x, total)

    equations = jax.make_jaxpr(run)(jnp.int32(3), jnp.int32(2)).eqns
    found = {each.primitive.name for each in equations}
    assert found >= operations
    assert "cond" in operations or "cond" not in found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_every_microbatch_is_first_and_last_once(name):
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=chunks)
    turns = make_turns(schedule)
    for kind in ("forward", "backward"):
        for numbers in (turns[kind].first, turns[kind].last):
            assert sorted(numbers[numbers != IDLE]) == list(range(8))


def test_1f1b_takes_the_head_in_whole_phases():
    """Fails if the ticks in which a pipeline empties run products of the vocabulary."""
    schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8)
    last = make_turns(schedule)["backward"].last
    of_phases = [
        set(last[phase.start : phase.end] != IDLE)
        for phase in schedule.phases
        if "backward" in phase.kinds
    ]
    assert of_phases == [{True}, {False}]
