"""How numbers grow over the steps, and what is refused of it in exact words."""

import math

import pytest

from zjax.schedule.pacing import Pacing, grow, hold, make_pacing
from zjax.settings import schema

HERE = "tests.schedule.test_pacing"


def doubling(step):
    return min(8 << step // 3, 64)


def falling(step):
    return 100 - max(10, step)


def failing(step):
    return 1 % step


@pytest.mark.parametrize(
    ("pacing", "golden"),
    [
        (
            grow(8, 1024, 15_000, multiple=8),
            {1: 8, 119: 16, 500: 40, 7_500: 512, 14_999: 1016, 15_000: 1024},
        ),
        (grow(1, 100, 110_000, degree=2), {1: 1, 1_100: 10, 27_500: 50, 110_000: 100}),
        (
            grow(128, 2048, 200_000, multiple=16),
            {0: 128, 1_666: 128, 1_667: 144, 100_000: 1088, 199_999: 2032}
            | {200_000: 2048, 10**9: 2048},
        ),
        (
            make_pacing(schema.DiscretePacing(values=(1, 2, 3), last_steps=(5, 10))),
            {1: 1, 5: 1, 6: 2, 10: 2, 11: 3},
        ),
        (grow(1, 50, 49), {1: 2, 2: 3, 8: 9}),
    ],
    ids=["linear", "root", "from-zero", "discrete", "float64-is-too-low"],
)
def test_golden_values(pacing, golden):
    assert {step: pacing.at(step) for step in golden} == golden


@pytest.mark.parametrize(("end", "num_steps"), [(1024, 97), (72, 997), (10**6, 50)])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_growth_is_its_formula_at_every_step(end, num_steps, degree):
    """Exact where floats are not: cubes have no exact cube root in float64."""
    pacing = grow(8, end, num_steps, multiple=8, degree=degree)
    for step in range(num_steps + 2):
        share = (step / num_steps) ** (1 / degree)
        value = min(8 + math.floor(share * (end - 8) + 1e-9), end)
        assert pacing.at(step) == value - value % 8


@pytest.mark.parametrize(
    "pacing", [grow(8, 1024, 997, multiple=8), grow(1, 9_000, 40, degree=2), hold(16)]
)
def test_changes_and_sums_are_those_of_the_steps(pacing):
    at = [pacing.at(step) for step in range(1, 1200)]
    changes = {1: at[0]}
    changes |= {n + 1: at[n] for n in range(1, len(at)) if at[n] != at[n - 1]}
    assert pacing.changes() == changes
    for step in (0, 1, 7, 500, 1199):
        assert pacing.sum_until(step) == sum(at[:step])


def test_a_function_of_the_user_is_followed():
    settings = schema.CustomPacing(function=f"{HERE}:doubling", num_steps=10)
    expected = Pacing(firsts=(0, 3, 6, 9), values=(8, 16, 32, 64))
    assert make_pacing(settings) == expected
