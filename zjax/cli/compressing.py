"""Command that quantises trained weights: `zjax compress`."""

import dataclasses
import pathlib
import sys
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from zjax.checkpoint.export import find_start
from zjax.checkpoint.start import names_huggingface, settings_of_weights
from zjax.checkpoint.tokenizer import CheckpointTokenizer, tokenizer_of_run
from zjax.cli import commands
from zjax.cli.usage import Command, flag
from zjax.compress.compress import PICTURE, compress_weights
from zjax.compress.opened import Opened, open_huggingface, open_run
from zjax.compress.parts import places_of
from zjax.config.flags import FILE_FLAGS, changes_given, refuse_flags
from zjax.config.load import load_config
from zjax.errors import ConfigError, Problem
from zjax.files import local_path, parse_json, read_text
from zjax.generation.loading import WITHOUT_MOMENTS
from zjax.settings.compress import RECIPES
from zjax.settings.derived import VOCABULARIES
from zjax.settings.schema import Config

_RECIPE = "w4a16_gptq"
"""Recipe of weights without settings of compression."""


def compress(given: flags.FlagValues) -> None:
    """Quantises weights by a recipe, and writes a directory for transformers."""
    recipe = read_recipe(given.recipe) if given["recipe"].present else None
    if not given.output:
        remedy = "name a new directory"
        raise ConfigError(Problem("--output", "", "is missing", remedy))
    output = local_path("output", given.output)
    opened, tokenizer = open_weights(given, recipe)
    console = Console(stderr=True)
    bar = Bar(
        TextColumn("blocks"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=len(places_of(opened.decoder)))
        found = compress_weights(
            opened,
            output,
            tokenizer,
            device=given.device,
            report=lambda text: print(text, file=sys.stderr),
            advance=lambda _: bar.advance(task),
        )
    print(found.text)
    print(f"wrote {output}, {found.num_bytes:,} bytes, and {PICTURE} in it")
    print(f"next: zjax generate --model={given.output}")


def read_recipe(given: str) -> dict[str, Any]:
    """Reads settings of `compress`: of a named recipe, or of a JSON file."""
    if given in RECIPES:
        return RECIPES[given]
    problem, remedy = "is no recipe", f"use {', '.join(RECIPES)}, or a JSON file"
    path = pathlib.Path(local_path("recipe", given)) if given else None
    if path is None or not path.is_file():
        raise ConfigError(Problem("--recipe", given, problem, remedy))
    try:
        found = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
        raise ConfigError(Problem("--recipe", given, problem, remedy)) from error
    if not isinstance(found, dict):
        problem = "holds no settings of compress"
        raise ConfigError(Problem("--recipe", given, problem, "write an object"))
    return found


def open_weights(
    given: flags.FlagValues, recipe: dict[str, Any] | None
) -> tuple[Opened, tuple[CheckpointTokenizer, pathlib.Path | None]]:
    """Opens the weights of `--run` or `--model`, and the tokenizer."""
    if bool(given.run) == bool(given.model):
        problem = "needs one of --run and --model"
        remedy = "give the directory of a run, or of a Hugging Face checkpoint"
        raise ConfigError(Problem("zjax compress", given.recipe, problem, remedy))
    if given.model:
        refuse_flags(given, ["part", "step", *FILE_FLAGS], "has no effect with --model")
        directory = local_path("model", given.model)
        if not names_huggingface(directory):
            remedy = "give a directory with config.json and safetensors"
            problem = "is no checkpoint of Hugging Face"
            raise ConfigError(Problem("--model", given.model, problem, remedy))
        start = settings_of_weights(directory) | WITHOUT_MOMENTS
        start |= {"compress": RECIPES[_RECIPE] if recipe is None else recipe}
        config = load_config({}, start, *changes_given(given))
        _check_tokens(config.data.source, config.model.vocab_size)
        tokenizer = CheckpointTokenizer(None, pathlib.Path(directory))
        return open_huggingface(config), (tokenizer, find_start(directory))
    config = run_settings(given, recipe)
    store = commands.open_store(config.directory)
    step = commands.chosen_step(store, given.step)
    opened, part = open_run(config, given.part, step)
    commands.report_weights(part, step)
    start = find_start(config.checkpoint.init_from)
    return opened, (tokenizer_of_run(store, step), start)


def _check_tokens(source: str, size: int) -> None:
    """Refuses bytes, the default of the data, for a checkpoint of other tokens."""
    if source == "standard_library" and size != (most := VOCABULARIES[source]):
        problem = f"has {most} tokens, which are not the {size} of --model"
        remedy = "give texts by data.source=tokens, of `zjax data prepare`"
        raise ConfigError(Problem("data.source", source, problem, remedy))


def run_settings(given: flags.FlagValues, recipe: dict[str, Any] | None) -> Config:
    """Reads settings of a run, with a recipe or else the recipe of the run.

    A run without the section `compress` takes the default recipe, whose settings are
    the defaults of the section.
    """
    config = commands.settings(given)
    if recipe is None and config.compress is not None:
        print("recipe: the section compress of the settings", file=sys.stderr)
        return config
    recipe = RECIPES[_RECIPE] if recipe is None else recipe
    # Given changes lie over the recipe.
    config = dataclasses.replace(config, compress=None)
    return load_config(config, {"compress": recipe}, *changes_given(given))


COMPRESS = Command(
    compress,
    "Quantises trained weights: GPTQ, AWQ, SmoothQuant or round to nearest.",
    "zjax compress --run=runs/quickstart --recipe=w4a16_gptq --output=small\n"
    "zjax compress --model=checkpoints/Qwen3-8B --recipe=w4a16_awq --output=small \\\n"
    "    --config.data.source=tokens --config.data.path=tokens\n"
    "zjax compress --run=runs/quickstart --recipe=w4a16_gptq --output=small \\\n"
    "    --config.compress.num_rows=512",
    (
        commands.RUN,
        commands.MODEL,
        commands.PART,
        commands.STEP,
        flag(
            "recipe",
            f"Settings of compress: {', '.join(RECIPES)}, or a JSON file; "
            "left out, those of a run with the section.",
            _RECIPE,
        ),
        flag("output", "Directory to write, for transformers and vLLM."),
        flag("device", "Kind of the device whose memory times a token, such as H200."),
    ),
)
