"""A number that was measured several times."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range of n measurements, 1 or more."""

    median: int | float
    min: int | float
    max: int | float
    n: int

    @classmethod
    def of(cls, values: Sequence[int | float]) -> "Spread":
        """Summarises one or more measurements.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0]).describe("{:.1f}".format)
            '2.0 [1.0 to 3.0, n=3]'
        """
        return cls(statistics.median(values), min(values), max(values), len(values))

    def describe(self, form: Callable[[int | float], str]) -> str:
        """The median and, if n > 1, the range; `form` formats one number."""
        if self.n == 1:
            return form(self.median)
        ends = f"{form(self.min)} to {form(self.max)}"
        return f"{form(self.median)} [{ends}, n={self.n}]"
