"""Refuses exports that round matrices again which a run learned on another grid."""

from collections.abc import Mapping
from typing import NamedTuple

from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.models.rounded import num_inputs_of
from zjax.ops.rounding import group_size
from zjax.settings.quantize import Quantize, Rule
from zjax.typing import Model
from zjax.weights import gguf_file
from zjax.weights.compressed_tensors import SCHEMES
from zjax.weights.quantized import FIELD
from zjax.weights.rounded import layers_of


class LayerGrid(NamedTuple):
    """Values that the weights of a layer have."""

    weights: str
    """Type of the codes."""
    group: int
    """Inputs that share a scale."""
    num_inputs: int
    """Inputs of the layer."""

    def __str__(self) -> str:
        if self.group == self.num_inputs:
            return f"{self.weights} in one group of all inputs"
        return f"{self.weights} in groups of {self.group} inputs"


class Layout(NamedTuple):
    """Codes of an export."""

    weights: str
    """Type of the codes that training has as well; empty for other codes."""
    group: int
    """Inputs that share a scale, or 0 for all; other matrices stay plain."""
    only: str = ""
    """Part of the paths of layers with codes."""

    def has_codes(self, path: str, grid: LayerGrid) -> bool:
        """Whether a layer goes out as codes."""
        return self.only in path and grid.num_inputs % (self.group or 1) == 0

    def keeps(self, path: str, grid: LayerGrid) -> bool:
        """Whether a layer has the values that it learned."""
        own = self.weights, self.group or grid.num_inputs
        return not self.has_codes(path, grid) or own == (grid.weights, grid.group)


HUGGINGFACE: Mapping[str, Layout] = {
    "mxfp4": Layout("mxfp4", Rule.MX_GROUP, "/experts/")
} | {name: Layout(scheme.weights, scheme.group) for name, scheme in SCHEMES.items()}
"""Codes of the layouts of `--format=hf`."""
_TYPES = {"q8_0": "int8", "mxfp4": "mxfp4"}
# Other types of blocks have a zero point, or map the largest value to -8 or -16.
GGUF: Mapping[str, Layout] = {
    name: Layout(_TYPES.get(name, ""), gguf_file.BLOCK)
    for name in gguf_file.TYPES
    if name not in gguf_file.FLOATS
}
"""Codes of the types of `--format=gguf`."""


def grids_of(settings: Quantize, num_inputs: Mapping[str, int]) -> dict[str, LayerGrid]:
    """Returns the grid of each layer that a rule rounds, by path.

    Args:
        settings: Rules of rounding.
        num_inputs: Inputs of each layer by path.

    Returns:
        Grids with groups as large as divide the inputs.

    Example:
        >>> print(grids_of(Quantize(), {"blocks/mlp/up": 192})["blocks/mlp/up"])
        int4 in groups of 96 inputs
    """
    found = dict[str, LayerGrid]()
    for path, number in num_inputs.items():
        rule = settings.rule_of(path)
        if rule is not None and rule.weights != "compute":
            size = group_size(number, rule.group_size)
            found[path] = LayerGrid(rule.weights, size, number)
    return found


def check_grid(
    settings: Quantize | None,
    model: Model,
    quantize: str,
    layouts: Mapping[str, Layout],
    *,
    has_adapters: bool,
) -> None:
    """Refuses codes that are not the codes which a layer of a run learned.

    Matrices with merged adapters lie on no grid, and the log says so. Layers without a
    rule may have any codes, and layers that stay plain keep the learned values.

    Args:
        settings: Rules of the run; None without any.
        model: Built-in model of the run, before rounding and without adapters.
        quantize: Layout with codes, a value of `--quantize`.
        layouts: Layouts of the format of the export, by name.
        has_adapters: Whether adapters were merged into the matrices.

    Raises:
        ConfigError: Some layer learned another grid.
    """
    learned = grids_of(settings, num_inputs_of(layers_of(model))) if settings else {}
    if learned and has_adapters:
        text = "rounds matrices with merged adapters, which lie on no grid, once more"
        logging.warning("%s=%s %s", FIELD, quantize, text)
        return
    fitting = [
        name
        for name, layout in layouts.items()
        if all(layout.keeps(*x) for x in learned.items())
        and any(layout.has_codes(*x) for x in learned.items())
    ]
    remedy = " or ".join([f"use {x}" for x in fitting] + [f"leave {FIELD} out"])
    paths = dict[str, list[str]]()
    for path, grid in learned.items():
        if not layouts[quantize].keeps(path, grid):
            paths.setdefault(str(grid), []).append(path)
    problems = []
    for grid, (first, *others) in sorted(paths.items()):
        more = f" and {len(others)} more layers" if others else ""
        problem = f"rounds again {first}{more}, which learned {grid}"
        problems.append(Problem(FIELD, quantize, problem, remedy))
    if problems:
        raise ConfigError(*problems)
