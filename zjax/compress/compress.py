"""Compresses weights: checks, calibration, the output and the comparison."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.checkpoint.tokenizer import CheckpointTokenizer
from zjax.compress.files import layout_of
from zjax.compress.notes import describe_layers
from zjax.compress.opened import Opened
from zjax.compress.output import write_output
from zjax.compress.partial import (
    CONTENTS,
    PartialOutput,
    directory_of,
    foreign_problems,
)
from zjax.compress.parts import inputs_of, layers_of, rule_of
from zjax.compress.report import Compared, describe_scores, plot_scores
from zjax.compress.sizes import find_memory, sizes_of
from zjax.compress.walk import BEFORE, Walk
from zjax.config.check import rounding_rule_problems
from zjax.config.quantize_rules import unused_rule_problems
from zjax.data.calibration import digest_batches, read_batches, row_problems
from zjax.data.source import open_rows
from zjax.errors import ConfigError, DataError, Problem, check_installed
from zjax.models.rounded import group_problems
from zjax.models.stack import Decoder
from zjax.processes import hold
from zjax.settings.compress import Compress, Smoothquant
from zjax.settings.ranges import range_problems
from zjax.settings.schema import Config

PICTURE = "size_and_loss.png"
"""Name of the picture in the output."""
_ROWS = "num_rows", "num_heldout_rows"


class Compressed(NamedTuple):
    """Report of compressed weights."""

    text: str
    """Table before and after, and notes."""
    found: dict[str, Compared]
    """Sizes and scores by name of the weights."""
    num_bytes: int
    """Bytes of the output."""


def compress_weights(
    opened: Opened,
    output: str,
    tokenizer: tuple[CheckpointTokenizer, pathlib.Path | None],
    *,
    device: str = "",
    report: Callable[[str], None] = print,
    advance: Callable[[int], None] = lambda _: None,
) -> Compressed:
    """Compresses weights as `config.compress` says, and writes a directory.

    An earlier call with equal weights and settings that was stopped goes on. Blocks
    of other settings are kept, and the call is refused.

    Args:
        opened: Weights, with the settings of data and compression.
        output: Directory to write; must be empty or missing.
        tokenizer: Tokenizer of the output, and the directory of files of a start.
        device: Device that decodes, for the time of a token; "" is the local one.
        report: Function that is told what begins.
        advance: Function that is called after each block.

    Returns:
        Table of the weights before and after, on held-out rows.

    Raises:
        ConfigError: Settings do not fit the model, the data or the output; all at once.
    """
    settings = opened.config.compress
    assert settings is not None
    memory, device = find_memory(device)
    if any(rule.weights == "nf4" for rule in settings.rules):
        check_installed("qwix")
    if problems := [*problems_of(opened, settings, output)]:
        raise ConfigError(*problems)
    given = opened.config, opened.decoder, opened.shapes
    layout = layout_of(*given, settings)
    if why := layout.why_plain:
        report(f"weights go out in {opened.dtype}, on the grid of codes: {why}")
    if opened.learned:
        report("the weights have the values that training rounded them to")
    calibration, heldout = read_rows(opened.config, settings)
    # A second call with this output would write the same blocks.
    with hold(str(directory_of(output))):
        partial = PartialOutput(output, origin_of(opened, settings, calibration))
        if partial.restarted:
            report(f"begins anew: {partial.restarted}")
        elif partial.num_blocks:
            report(f"goes on after {partial.num_blocks} blocks of an earlier call")
        walk = Walk(opened, settings, calibration, heldout, layout.coded)
        outcome = walk.run(partial, advance)
        # Before blocks are removed: a failure here must not cost them.
        sizes = [
            sizes_of(opened.config.model, x) for x in (layout_of(*given, None), layout)
        ]
        found = {
            name: Compared(sizes[name != BEFORE], score)
            for name, score in outcome.scores.items()
        }
        num_tokens = sum(int((x["weights"] > 0).sum()) for x in heldout)
        table = describe_scores(found, memory, device, num_tokens)
        num_bytes = write_output(
            opened,
            partial,
            output,
            tokenizer,
            layout,
            lambda folder: plot_scores(found, folder / PICTURE),
        )
        partial.remove()
    notes = describe_layers(opened, settings, layout)
    text = "\n".join([table, *notes, *outcome.notes])
    return Compressed(text, found, num_bytes)


def problems_of(opened: Opened, settings: Compress, output: str) -> Iterator[Problem]:
    """Yields settings that do not fit the model, the data or the output."""
    yield from recipe_problems(opened.config, opened.decoder, settings)
    if not [*range_problems(opened.config)]:
        yield from _row_problems(opened.config, settings)
    yield from _output_problems(output)


def recipe_problems(
    config: Config, decoder: Decoder, settings: Compress
) -> Iterator[Problem]:
    """Yields settings that do not fit the model, whatever the data and the output."""
    broken = [*range_problems(config)]
    unusable = [*rounding_rule_problems("compress.rules", settings.rules)]
    yield from (*broken, *unusable)
    # Patterns that are no expressions cannot be searched.
    if unusable or any(x.field.startswith("compress.rules") for x in broken):
        return
    paths = layers_of(decoder)
    chosen = {path: rule_of(settings, path) for path in paths}
    yield from unused_rule_problems("compress.rules", settings.rules, paths)
    if not any(rule and rule.weights != "compute" for rule in chosen.values()):
        problem, remedy = "round no weights", "give a rule with weights such as int4"
        yield Problem("compress.rules", len(settings.rules), problem, remedy)
    yield from group_problems("compress.rules", settings.rules, inputs_of(decoder))
    yield from _activation_problems(settings, paths, chosen)
    moe: Any = config.model.moe
    if moe and settings.method.calibrates and moe.kind != "token_choice":
        problem = "has experts that choose tokens, which are not recorded"
        remedy = "use compress.method=nearest"
        yield Problem("model.moe", moe.kind, problem, remedy)


def _output_problems(output: str) -> Iterator[Problem]:
    """Yields an output that is no new directory."""
    target, remedy = pathlib.Path(output), "name a new directory"
    if target.name in ("", ".."):
        yield Problem("--output", output, "is no name of a new directory", remedy)
        return
    above = next(x for x in target.absolute().parents if x.exists())
    if not above.is_dir():
        yield Problem("--output", output, f"lies below {above}, a file", remedy)
        return
    yield from foreign_problems(output)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        yield Problem("--output", output, "exists and is not empty", remedy)


def _activation_problems(
    settings: Compress, paths: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yields rules of activations that a method or a layer does not honour."""
    rounds = [x for x, rule in chosen.items() if rule and rule.activations != "compute"]
    method = settings.method
    if isinstance(method, Smoothquant) and not rounds:
        problem = "moves outliers of activations, but no rule rounds activations"
        remedy = "set activations of a rule, or use gptq or awq"
        yield Problem("compress.method", method.kind, problem, remedy)
    experts = [path for path in rounds if paths[path].has_experts]
    if experts:
        rule = chosen[experts[0]]
        problem = f"is not honoured for the experts of {experts[0]}"
        remedy = "give experts a rule of their own, before this one"
        field = f"compress.rules[{settings.rules.index(rule)}].activations"
        yield Problem(field, rule.activations, problem, remedy)


def _row_problems(config: Config, settings: Compress) -> Iterator[Problem]:
    """Yields numbers of rows that the data does not have."""
    for name, split in zip(_ROWS, ("train", "validation"), strict=True):
        if split == "train" and not settings.method.calibrates:
            continue
        number = {f"compress.{name}": getattr(settings, name)}
        try:
            yield from row_problems(open_rows(config, split), number, split)
        except DataError as error:
            yield from error.problems


def read_rows(
    config: Config, settings: Compress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Reads the batches to calibrate with, and held-out batches."""
    numbers = settings.num_rows, settings.num_heldout_rows
    given = {"length": config.data.length, "seed": config.seed}
    calibration, heldout = (
        read_batches(open_rows(config, split), number, **given)
        for split, number in zip(("train", "validation"), numbers, strict=True)
    )
    return calibration, heldout


def origin_of(
    opened: Opened, settings: Compress, batches: list[dict[str, Any]]
) -> dict[str, Any]:
    """Lists all that compressed blocks depend on."""
    # Held-out rows change no block.
    read = dataclasses.replace(settings, num_heldout_rows=1)
    return {
        "weights": opened.name,
        CONTENTS: opened.digest(),
        "recipe": repr(read),
        "model": repr(opened.config.model),
        "dtype": opened.dtype,
        "rows": digest_batches(batches),
    }
