"""Settings of quantisation after training, by `zjax compress`, and named recipes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from zjax.settings import ranges
from zjax.settings.choices import Choice, section
from zjax.settings.quantize import Rule

Strength = Annotated[
    float, ranges.Range(lambda x: 0 < x < 1, "use a number between 0 and 1")
]


@section
class Method(Choice):
    """How weights are rounded to the codes that the rules say."""

    calibrates: ClassVar[bool] = True
    """Whether the method reads what enters the matrices."""


@section
class Nearest(Method):
    """Round to nearest, without calibration."""

    calibrates: ClassVar[bool] = False


@section
class Gptq(Method):
    """Later inputs make up for the error of earlier ones (arXiv:2210.17323)."""

    damp: ranges.Positive = 0.01
    """Multiple of the mean diagonal of the Hessian that is added to the diagonal."""
    activation_order: bool = True
    """Whether inputs are rounded in the order of their magnitudes, largest first."""


@section
class Awq(Method):
    """Scales inputs of large activations up before rounding (arXiv:2306.00978)."""


@section
class Smoothquant(Method):
    """Moves outliers of activations into the weights (arXiv:2211.10438)."""

    strength: Strength = 0.5
    """Share of the outliers that goes into the weights."""


@section
class Compress:
    """Quantisation of trained weights, layer by layer."""

    rules: tuple[Rule, ...] = (Rule(),)
    """Codes by layer; the first rule whose pattern matches wins. Embeddings, norms,
    routers and the output matrix stay as they are."""
    method: Nearest | Gptq | Awq | Smoothquant = Gptq()
    """How weights are rounded."""
    num_rows: Annotated[int, ranges.at_least(1)] = 128
    """Rows of the training data that calibrate."""
    num_heldout_rows: Annotated[int, ranges.at_least(1)] = 16
    """Rows of the validation data on which weights before and after are compared."""
    expert_tokens: Annotated[int, ranges.at_least(1)] = 128
    """Tokens that an expert needs for calibration; experts that saw fewer are rounded
    to nearest, and named."""


def _recipe(method: str, **rule: Any) -> dict[str, Any]:
    """Returns the settings of a recipe with one rule."""
    return {"method": method, "rules": [rule]}


RECIPES: Mapping[str, dict[str, Any]] = {
    "w4a16_gptq": _recipe("gptq", weights="int4", group_size=128),
    "w4a16_awq": _recipe("awq", weights="int4", group_size=128),
    "w8a8_smoothquant": _recipe(
        "smoothquant", weights="int8", group_size=0, activations="int8"
    ),
    "fp8": _recipe("nearest", weights="float8", group_size=0, activations="float8"),
    "w8a16": _recipe("nearest", weights="int8", group_size=0),
}
"""Settings of `compress` by the names of recipes."""
