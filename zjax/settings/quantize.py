"""Settings of matrices and activations that are rounded to few bits."""

import re
from typing import Annotated, ClassVar, Literal

from zjax.settings import ranges
from zjax.settings.choices import section

Weights = Literal["compute", "int8", "int4", "int3", "nf4", "float8", "mxfp4"]
"""Types of the codes of a matrix; `compute` does not round."""
Activations = Literal["compute", "int8", "float8"]
"""Types of the codes of what enters a matrix; `compute` does not round."""


@section
class Rule:
    """Codes of the linear layers whose path matches a pattern."""

    MX_GROUP: ClassVar[int] = 32
    """Inputs that share a scale of mxfp4, as the format says."""

    pattern: str = ".*"
    """Regular expression searched in paths of linear layers, such as
    `blocks/attention/query`."""
    weights: Weights = "int4"
    """Type of the codes of the matrices."""
    group_size: Annotated[int, ranges.at_least(0, ranges.MAX_WIDTH)] = 128
    """Most inputs that share a scale, for each output of a matrix: groups are as large
    as divide its inputs, such as 96 of 192; 0 is one scale for all inputs of an
    output."""
    activations: Activations = "compute"
    """Type of the codes of what enters the layers, with one scale for each token."""

    def matches(self, path: str) -> bool:
        """Whether the pattern is found in the path of a layer.

        Example:
            >>> Rule(pattern="mlp").matches("blocks/attention/query")
            False
        """
        return re.search(self.pattern, path) is not None


@section
class Quantize:
    """Rules of rounding by layer; the first rule whose pattern matches wins."""

    rules: tuple[Rule, ...] = (Rule(),)
    """Rules in order; layers that no rule matches are not rounded."""

    def rule_of(self, path: str) -> Rule | None:
        """Returns the first rule that matches the path of a layer; None without one.

        Example:
            >>> rules = Rule(pattern="out", weights="int8"), Rule()
            >>> Quantize(rules=rules).rule_of("blocks/attention/out").weights
            'int8'
        """
        return next((rule for rule in self.rules if rule.matches(path)), None)
