"""Tokens per sequence by step: sequence length warm-up."""

import dataclasses
import itertools
from collections.abc import Iterator

from zjax.config import axes, schema, sequence
from zjax.errors import Problem


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of a run; its steps are 1 or more.

    Args:
        start: Tokens per sequence at first.
        full: Tokens per sequence at the end.
        num_steps: First step with whole sequences, 1 or more.
        multiple: Lengths are multiples of it; it divides `start` and `full`.

    Example:
        >>> lengths = Lengths(start=8, full=1024, num_steps=15_000, multiple=8)
        >>> [lengths.at(step) for step in (1, 119, 500, 7_500, 14_999, 15_000)]
        [8, 16, 40, 512, 1016, 1024]

    Reference:
        Li et al., The Stability-Efficiency Dilemma (arXiv:2108.06084), section 4.1.
    """

    start: int
    full: int
    num_steps: int
    multiple: int

    def at(self, step: int) -> int:
        """Tokens per sequence of a step."""
        grown = (self.full - self.start) * step // self.num_steps
        return min(self.start + grown - grown % self.multiple, self.full)

    def changes(self) -> dict[int, int]:
        """The lengths by their first step, in order.

        Example:
            >>> Lengths(start=8, full=24, num_steps=4, multiple=8).changes()
            {1: 8, 2: 16, 4: 24}
        """
        firsts = {1: self.start}
        for length in range(self.start, self.full + 1, self.multiple):
            grown = (length - self.start) * self.num_steps
            first = -(-grown // max(1, self.full - self.start))
            firsts[max(1, first)] = length
        return firsts

    def sum_until(self, step: int) -> int:
        """Tokens of one row of a batch over the first steps.

        Example:
            >>> lengths = Lengths(start=8, full=16, num_steps=4, multiple=8)
            >>> [lengths.sum_until(step) for step in (0, 3, 4, 6)]
            [0, 24, 40, 72]
        """
        firsts = [*self.changes(), max(step, self.num_steps) + 1]
        return sum(
            self.at(first) * max(0, min(after, step + 1) - first)
            for first, after in itertools.pairwise(firsts)
        )


def make_lengths(config: schema.Config) -> Lengths:
    """The lengths of a run.

    Args:
        config: Read for `sequence_warmup` and `data.length`.

    Example:
        >>> config = schema.Config(data=schema.Data(length=512))
        >>> make_lengths(config).at(1)
        512
    """
    settings, full = config.sequence_warmup, config.data.length
    if settings.form == "none":
        return Lengths(full, full, 1, full)
    return Lengths(settings.start_length, full, settings.num_steps, settings.multiple)


def length_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Problems of `sequence_warmup`.

    Args:
        config: Settings in their ranges.
        num_devices: Devices of the run.
    """
    settings, full = config.sequence_warmup, config.data.length
    if settings.form == "none":
        return
    field, start = "sequence_warmup.start_length", settings.start_length
    if start >= full:
        problem = f"is not shorter than data.length={full}"
        yield Problem(field, start, problem, "use a smaller one, or form='none'")
    yield from _multiple_problems(config, num_devices)
    if settings.num_steps > config.num_steps:
        problem = f"is beyond num_steps={config.num_steps}"
        remedy = f"use at most {config.num_steps}"
        field = "sequence_warmup.num_steps"
        yield Problem(field, settings.num_steps, problem, remedy)


def _multiple_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    settings = config.sequence_warmup
    field, multiple = "sequence_warmup.multiple", settings.multiple
    for name, length in (
        ("sequence_warmup.start_length", settings.start_length),
        ("data.length", config.data.length),
    ):
        if length % multiple:
            problem, remedy = f"does not divide {name}={length}", "use a divisor"
            yield Problem(field, multiple, problem, remedy)
    if axes.mesh_fills(config, num_devices):
        sizes = axes.axis_sizes(config, num_devices)
        yield from sequence.length_problems(
            field,
            multiple,
            config.model,
            sequence=sizes["sequence"],
            tensor=sizes["tensor"],
        )
    block = config.model.sparsity.block
    if config.model.attention == "sparse" and multiple % block:
        problem = f"is not a multiple of model.sparsity.block={block}"
        yield Problem(field, multiple, problem, f"use {block} or a multiple of it")
