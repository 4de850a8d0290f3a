"""Settings of objectives that compare completions, on the examples of `data.path`."""

from typing import Annotated, ClassVar

from zjax.settings import ranges
from zjax.settings.choices import Choice, section

WrongShare = Annotated[
    float,
    ranges.Range(lambda x: 0 <= x < 0.5, "use 0 or more and less than 0.5"),
]


@section
class Preference(Choice):
    """Objective on completions that were compared or labelled."""

    examples: ClassVar[tuple[str, ...]] = ("pairs",)
    """Kinds of examples that the objective reads."""
    reads_reference: ClassVar[bool] = False
    """Whether the objective reads log-probabilities of a reference model."""
    has_rewards: ClassVar[bool] = False
    """Whether the model gives rewards, by `model.value_head`, which is then on."""


@section
class Referenced(Preference):
    """Objective with a reference model: the weights that the run starts from.

    Log-probabilities of the reference are computed once and stored beside the data.
    """

    reads_reference: ClassVar[bool] = True
    beta: ranges.Positive = 0.1
    """Strength of the tie to the reference; `ipo` has the margin `1 / (2 beta)`."""


@section
class Dpo(Referenced):
    """Direct preference optimization (arXiv:2305.18290)."""

    label_smoothing: WrongShare = 0.0
    """Assumed share of pairs whose preference is wrong."""
    robust: bool = False
    """Whether the loss is the loss of right preferences in expectation, at that share
    of wrong ones (arXiv:2403.00409), in place of a smoothed target."""


@section
class Hinge(Referenced):
    """Hinge loss of the margin of DPO (arXiv:2309.06657)."""


@section
class Ipo(Referenced):
    """Squared distance of mean log-ratios from a margin (arXiv:2310.12036)."""


@section
class ApoZero(Referenced):
    """Chosen completions more likely, rejected ones less (arXiv:2408.06266)."""


@section
class Simpo(Preference):
    """Margin of mean log-probabilities, without a reference (arXiv:2405.14734)."""

    scale: ranges.Positive = 2.0
    """Factor of the difference of means, beta of the paper."""
    gamma: ranges.NonNegative = 1.0
    """Margin that the chosen completion is to win by."""


@section
class Orpo(Preference):
    """Supervised loss and odds ratio, without a reference (arXiv:2403.07691)."""

    weight: ranges.NonNegative = 0.1
    """Weight of the odds ratio."""


@section
class Kto(Referenced):
    """Completions called desirable or not, without pairs (arXiv:2402.01306)."""

    examples: ClassVar[tuple[str, ...]] = ("labels",)
    desirable_weight: ranges.NonNegative = 1.0
    """Weight of desirable completions."""
    undesirable_weight: ranges.NonNegative = 1.0
    """Weight of undesirable completions."""


@section
class RewardModel(Preference):
    """Reward of the last token, learned from comparisons (arXiv:2203.02155)."""

    examples: ClassVar[tuple[str, ...]] = ("pairs", "ranked")
    has_rewards: ClassVar[bool] = True
    centering: ranges.NonNegative = 0.0
    """Weight of the square that keeps the mean reward near 0 (arXiv:2312.09244)."""
