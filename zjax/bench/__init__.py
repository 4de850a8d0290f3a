"""Measures how fast a configuration trains on this machine."""

from zjax.bench.measure import Measurement, describe_measurement, measure
from zjax.bench.spread import Spread
from zjax.processes.programs import result_line

__all__ = [
    "Measurement",
    "Spread",
    "describe_measurement",
    "measure",
    "result_line",
]
