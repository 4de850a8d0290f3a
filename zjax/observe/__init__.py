"""Reports of a run: metrics, throughput, machine, traces and plots."""

from zjax.observe.collectives import Collective, list_collectives
from zjax.observe.communication import describe_communication, zero_volume
from zjax.observe.history import check_directory, read_history
from zjax.observe.metrics import LateMetrics, Throughput
from zjax.observe.plot import plot_load, plot_memory_per_stage, plot_metrics, plot_run
from zjax.observe.progress import Progress
from zjax.observe.recompile import CompileReport, Trace
from zjax.observe.sinks import Sink, check_sinks, make_sinks

__all__ = [
    "Collective",
    "CompileReport",
    "LateMetrics",
    "Progress",
    "Sink",
    "Throughput",
    "Trace",
    "check_directory",
    "check_sinks",
    "describe_communication",
    "list_collectives",
    "make_sinks",
    "plot_load",
    "plot_memory_per_stage",
    "plot_metrics",
    "plot_run",
    "read_history",
    "zero_volume",
]
