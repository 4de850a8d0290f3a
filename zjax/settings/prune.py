"""Settings of a start from some layers and channels of a larger model."""

from typing import Annotated

from zjax.settings import ranges
from zjax.settings.choices import Choice, section


@section
class Influence(Choice):
    """Layers with outputs that differ most from inputs (arXiv:2403.03853).

    The measure is the mean over tokens of 1 - cos of the residual stream before and
    after a layer.
    """


@section
class Even(Choice):
    """Layers at equal distances, with the first and the last (arXiv:1910.01108)."""


@section
class Listed(Choice):
    """Layers by number, as in `teacher_layer` of XTC (arXiv:2206.01859)."""

    numbers: tuple[int, ...] = ()
    """Ascending numbers of the kept layers, from 0."""


@section
class Prune:
    """Start from some layers and channels of a larger decoder (arXiv:2407.14679).

    `model` says how many stay of the layers, heads, channels and experts of the model
    of `checkpoint.init_from`.
    """

    layers: Influence | Even | Listed = Influence()
    """Choice of the layers, where `model.num_layers` is smaller."""
    num_rows: Annotated[int, ranges.at_least(1, 4_096)] = 32
    """Training rows of `data` that measure how important layers and channels are."""
