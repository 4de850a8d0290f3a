"""Sizes and times of all recipes, before anything is compressed."""

import jax

from zjax.compress.compress import recipe_problems
from zjax.compress.files import layout_of
from zjax.compress.opened import calibrated
from zjax.compress.sizes import find_memory, milliseconds, sizes_of
from zjax.config.load import load_config
from zjax.errors import ConfigError, Problem
from zjax.models.build import make_model
from zjax.models.stack import Decoder
from zjax.settings.compress import RECIPES, Compress
from zjax.settings.schema import Config
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.placement import abstract_key
from zjax.weights.source import name_leaves


def report_recipes(config: Config, device: str = "") -> str:
    """Predicts size and decode time of a model by each recipe; reads no weights.

    Args:
        config: Settings of the model; `config.compress` is a further recipe.
        device: Name of the device that decodes; "" is the local device.

    Returns:
        A table of the plain weights and of each recipe, and recipes without codes.

    Raises:
        ConfigError: The device is unknown, the model is no decoder, no family of
            Hugging Face computes the outputs, or `config.compress` does not fit.
    """
    memory, device = find_memory(device)
    if config.model.kind != "decoder":
        problem, remedy = "is not compressed", "give a decoder"
        raise ConfigError(Problem("model.kind", config.model.kind, problem, remedy))
    config = calibrated(config)
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, abstract_key())
    decoder = model.bind(params, {})
    assert isinstance(decoder, Decoder)
    shapes = name_leaves(params)
    recipes: dict[str, Compress | None] = {"as they are": None}
    for name, recipe in RECIPES.items():
        recipes[name] = load_config({}, {"compress": recipe}).compress
    if config.compress is not None:
        if problems := [*recipe_problems(config, decoder, config.compress)]:
            raise ConfigError(*problems)
        recipes["as configured"] = config.compress
    rows, notes = [], list[str]()
    for name, settings in recipes.items():
        layout = layout_of(config, decoder, shapes, settings)
        sizes = sizes_of(config.model, layout)
        if layout.why_plain:
            notes.append(f"{name}: plain: {layout.why_plain}")
        time = f"{milliseconds(sizes, memory):.3g}"
        rows.append((name, format_bytes(sizes.total), time))
    table = render_table(("weights", "size", "ms a token"), rows, right=(1, 2))
    note = f"one text on {device}, as fast as its memory delivers weights"
    return "\n".join([table, note, *notes])
