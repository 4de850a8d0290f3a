"""Pacings that the settings of a run use."""

from collections.abc import Iterator

from zjax.schedule.curriculum import metric_field
from zjax.settings import schema


def used_pacings(config: schema.Config) -> Iterator[tuple[str, schema.Pacing]]:
    """Yields the path and the settings of each pacing that a run reads.

    Example:
        >>> config = schema.Config(random_ltd=schema.RandomLTD(form="span"))
        >>> [field for field, _ in used_pacings(config)]
        ['random_ltd.pacing']
    """
    if config.sequence_warmup.form != "none":
        yield "sequence_warmup.pacing", config.sequence_warmup.pacing
    for number, metric in enumerate(config.curriculum.metrics):
        yield f"{metric_field(number)}.pacing", metric.pacing
    if config.buckets.form != "none" and config.buckets.order == "pacing":
        yield "buckets.pacing", config.buckets.pacing
    if config.random_ltd.form != "none":
        yield "random_ltd.pacing", config.random_ltd.pacing
