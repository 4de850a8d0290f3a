"""Checks of `curriculum`: metrics and the pacing of their difficulty."""

import pathlib
from collections.abc import Iterator

from zjax.config import schema
from zjax.config.pacing import pacing_problems
from zjax.errors import Problem

PERCENTILES = 100


def metric_field(number: int) -> str:
    """Path of the settings of a metric.

    Example:
        >>> metric_field(0)
        'curriculum.metrics[0]'
    """
    return f"curriculum.metrics[{number}]"


def metric_name(metric: schema.CurriculumMetric) -> str:
    """Name of a difficulty in the metrics of steps: that of the file of its index.

    Example:
        >>> metric_name(schema.CurriculumMetric(index="index/voc.index"))
        'difficulty_voc'
    """
    return f"difficulty_{pathlib.Path(metric.index).stem}"


def curriculum_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `curriculum`, as far as they show without its indexes.

    Args:
        config: Settings in their ranges.
        num_devices: Devices of the run.
    """
    fields: dict[str, str] = {}
    for number, metric in enumerate(config.curriculum.metrics):
        field = metric_field(number)
        first = fields.setdefault(metric_name(metric), field)
        if first != field and metric.index:
            problem = f"has the name of {first}.index"
            remedy = "give each index once, in files of different names"
            yield Problem(f"{field}.index", metric.index, problem, remedy)
        if not metric.index:
            remedy = "give a file of `zjax data analyze`, such as 'index/voc.index'"
            yield Problem(f"{field}.index", "", "names no file", remedy)
        is_percentile = metric.difficulty == "percentile"
        yield from pacing_problems(
            f"{field}.pacing",
            metric.pacing,
            num_steps=config.num_steps,
            longest=("percentiles", PERCENTILES) if is_percentile else None,
        )
