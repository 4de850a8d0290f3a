"""Measures how fast a configuration trains, alone or beside its peers."""

from zjax.bench.compete import Selection, compete
from zjax.bench.contest import Case, Contest, Contestant, Row
from zjax.bench.measure import (
    Measurement,
    describe_measurement,
    measure,
    result_line,
)
from zjax.bench.spread import Spread

__all__ = [
    "Case",
    "Contest",
    "Contestant",
    "Measurement",
    "Row",
    "Selection",
    "Spread",
    "compete",
    "describe_measurement",
    "measure",
    "result_line",
]
