"""Refuses exports that round matrices again which a run learned on another grid."""

from collections.abc import Mapping

from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.settings.quantize import Quantize
from zjax.weights.compressed_tensors import SCHEMES
from zjax.weights.quantized import FIELD

Grid = tuple[str, int]
"""Type of the codes, and inputs that share a scale; 0 for all inputs of an output."""
_MX: Mapping[str, Grid] = {"mxfp4": ("mxfp4", 32)}
HUGGINGFACE: Mapping[str, Grid] = _MX | {
    name: (scheme.dtype.removesuffix("_e4m3fn"), scheme.group)
    for name, scheme in SCHEMES.items()
}
"""Grids of the layouts of `--format=hf`."""
# The other types of blocks have a zero point, or map the largest value to -8 or -16.
GGUF: Mapping[str, Grid] = _MX | {"q8_0": ("int8", 32)}
"""Grids of the types of `--format=gguf` that training rounds to as well."""


def check_grid(
    settings: Quantize | None,
    quantize: str,
    grids: Mapping[str, Grid],
    *,
    has_adapters: bool,
) -> None:
    """Refuses a layout whose grid is none of the grids that the rules of a run name.

    Matrices with merged adapters lie on no grid, and the log says so. Matrices without
    a rule may be rounded to any layout.

    Args:
        settings: Rules of the run; None without any.
        quantize: Layout with codes, a value of `--quantize`.
        grids: Grids by layout of the format of the export.
        has_adapters: Whether adapters were merged into the matrices.

    Raises:
        ConfigError: Some rule learned another grid.
    """
    rules = settings.rules if settings else ()
    learned = {(x.weights, x.group_size) for x in rules if x.weights != "compute"}
    if learned and has_adapters:
        text = "rounds matrices with merged adapters, which lie on no grid, once more"
        logging.warning("%s=%s %s", FIELD, quantize, text)
        return
    fitting = [name for name, grid in grids.items() if learned == {grid}]
    remedy = " or ".join([f"use {x}" for x in fitting] + [f"leave {FIELD} out"])
    problems = [
        Problem(FIELD, quantize, f"rounds again what learned {_text(x)}", remedy)
        for x in sorted(learned)
        if x != grids.get(quantize)
    ]
    if problems:
        raise ConfigError(*problems)


def _text(grid: Grid) -> str:
    """Names the codes and groups of a grid."""
    weights, size = grid
    groups = f"groups of {size} inputs" if size else "one group of all inputs"
    return f"{weights} in {groups}"
