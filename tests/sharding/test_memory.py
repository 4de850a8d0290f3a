"""Bytes per device against the tables of the ZeRO paper."""

import pytest

from zjax.estimate import tables
from zjax.sharding import memory

DEVICES = (1, 4, 16, 64, 256, 1024)
PAPER = {
    7.5e9: (
        "120 52.5 35.6 31.4 30.4 30.1",
        "120 41.3 21.6 16.6 15.4 15.1",
        "120 30 7.5 1.88 0.47 0.12",
    ),
    128e9: (
        "2048 896 608 536 518 513.5",
        "2048 704 368 284 263 257.8",
        "2048 512 128 32 8 2",
    ),
    1e12: (
        "16000 7000 4750 4187.5 4046.9 4011.7",
        "16000 5500 2875 2218.8 2054.7 2013.7",
        "16000 4000 1000 250 62.5 15.6",
    ),
}


@pytest.mark.parametrize("num_params", PAPER, ids="{:.3g}".format)
def test_zero_table_equals_the_paper(num_params):
    lines = tables.describe_zero_table(num_params, DEVICES).splitlines()[2:]
    columns = list(zip(*(line.split() for line in lines), strict=True))
    assert columns[0] == tuple(map(str, DEVICES))
    assert tuple(map(" ".join, columns[2:])) == PAPER[num_params]


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, 120), (1, 31.40625), (2, 16.640625), (3, 1.875)]
)
def test_closed_form_on_64_devices(stage, expected):
    assert memory.zero_bytes(7.5e9, 64, stage).total == expected * 1e9


def test_master_and_moments_of_a_trillion_parameters_over_1024():
    assert memory.zero_bytes(1e12, 1024, 3).total == 16e12 / 1024
