"""Lines below the table: layers that do not go out as a rule or a method says."""

import textwrap
from collections.abc import Iterable, Iterator

from zjax.checkpoint.learned import grids_of
from zjax.compress.files import FileLayout
from zjax.compress.opened import Opened
from zjax.compress.parts import inputs_of, layers_of, parts_of, places_of, rule_of
from zjax.settings.compress import Awq, Compress, Smoothquant
from zjax.settings.quantize import Quantize

_WIDTH = 80


def describe_layers(
    opened: Opened, settings: Compress, layout: FileLayout
) -> Iterator[str]:
    """Yields lines with the names of layers that differ from rules and method.

    Args:
        opened: Decoder with shapes alone, and settings of the model.
        settings: Rules and method.
        layout: Tensors of the files.
    """
    for why in sorted({*layout.uncoded.values()}):
        paths = sorted(path for path, x in layout.uncoded.items() if x == why)
        yield _named(f"{opened.dtype} in the files, as {why}", paths)
    rules = {path: rule_of(settings, path) for path in layers_of(opened.decoder)}
    exact = [
        path
        for path, rule in rules.items()
        if rule and rule.activations != "compute" and path not in layout.coded
    ]
    if exact:
        text = "inputs are not rounded, in the files or the losses"
        yield _named(text, exact)
    if isinstance(settings.method, Awq | Smoothquant) and (
        found := [*_without_factors(opened, settings)]
    ):
        kind = settings.method.kind
        yield _named(f"without factors of {kind}, rounded to nearest", found)
    for grid, paths in _rounded_again(opened, settings).items():
        yield _named(f"rounded once more, as the run learned {grid}", paths)


def _without_factors(opened: Opened, settings: Compress) -> Iterator[str]:
    """Yields the layers whose inputs no norm or matrix before can divide."""
    places = {place.prefix: place for place in places_of(opened.decoder)}
    for prefix, place in places.items():
        layers, mixtures = parts_of(settings, opened.config, opened.decoder, place)
        folded = {path for fold in layers.folds for path in fold.consumers}
        for layer in layers.layers:
            if layer.path not in folded:
                yield f"{prefix}{layer.path}"
        for mixture in mixtures:
            for path in mixture.without_factors(settings.method):
                yield f"{prefix}{path}"


def _rounded_again(opened: Opened, settings: Compress) -> dict[str, list[str]]:
    """Returns the layers that leave the grid which a run learned, by that grid."""
    inputs = inputs_of(opened.decoder)
    learned = grids_of(opened.learned or Quantize(rules=()), inputs)
    after = grids_of(Quantize(rules=settings.rules), inputs)
    moves, found = isinstance(settings.method, Smoothquant), dict[str, list[str]]()
    for path, grid in learned.items():
        if path in after and (moves or grid != after[path]):
            found.setdefault(str(grid), []).append(path)
    return found


def _named(text: str, names: Iterable[str]) -> str:
    """Joins a text and names to lines that fit a terminal."""
    line = f"{text}: {', '.join(names)}"
    how = {"subsequent_indent": "  ", "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(line, _WIDTH, break_long_words=False, **how))
