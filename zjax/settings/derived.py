"""Defaults that depend on several settings, and marks of values that nobody set.

Such settings are written as 0, and filled in when a section is made. Filled-in values
are marked by a subclass of int: a change of a setting derives dependent values anew,
and printed configs show derived values as such. Two more marks
tell apart values that may have no effect (`offered`) and values of a config shipped
with zjax (`recipe`); a user's own value without effect is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

VOCABULARIES = {"standard_library": 257, "synthetic": 50_257}
"""Vocabulary sizes by `data.source`: bytes, and GPT-2, which is also the default."""
LENGTH_MULTIPLE = 64
"""First value and multiple of a length pacing, in tokens."""
KEPT_MULTIPLE = 128
"""First value and multiple of a random-LTD pacing, in kept tokens."""
_MULTIPLE = 256
"""Multiple to which gated feed-forward widths are rounded up (arXiv:2302.13971)."""


class Size(int):
    """Int that was derived."""


class OfferedFloat(float):
    """Float that may be unused where the setting has no effect."""


class OfferedInt(int):
    """Int that may be unused where the setting has no effect."""


class RecipeFloat(float):
    """Float of a config shipped with zjax, which a user's optimizer replaces."""


class RecipeInt(int):
    """Int of a config shipped with zjax, which a user's optimizer replaces."""


def as_recipe(section: Mapping[str, Any]) -> dict[str, Any]:
    """Marks the numbers of a section of a config shipped with zjax."""
    kinds = {int: RecipeInt, float: RecipeFloat, dict: as_recipe}
    return {
        name: kinds[type(value)](value) if type(value) in kinds else value
        for name, value in section.items()
    }


def is_recipe(value: Any) -> bool:
    """Whether a number comes from a config shipped with zjax."""
    return isinstance(value, RecipeFloat | RecipeInt)


def offered(value: int | float) -> int | float:
    """Marks a number that need not have an effect, as in a section that may be off."""
    return OfferedInt(value) if isinstance(value, int) else OfferedFloat(value)


def is_offered(value: Any) -> bool:
    """Whether a number may be unused."""
    return isinstance(value, OfferedFloat | OfferedInt)


def without_unused(config: Any) -> Any:
    """Resets offered loss-scale values that a run leaves unused, for a record.

    Values read back from a record count as set, and set values must have an effect.
    """
    precision = config.precision
    scale = {x.name: x.default for x in dataclasses.fields(precision.loss_scale)}
    unused = {
        n: x for n, x in scale.items() if is_offered(getattr(precision.loss_scale, n))
    }
    if precision.compute_dtype == "float16" or not unused:
        return config
    scale = dataclasses.replace(precision.loss_scale, **unused)
    precision = dataclasses.replace(precision, loss_scale=scale)
    return dataclasses.replace(config, precision=precision)


def is_derived(value: Any) -> bool:
    """Whether a value was derived, not set."""
    return isinstance(value, Size)


def reset(value: Any) -> Any:
    """Value as a config file writes it: 0 if it was derived."""
    return 0 if isinstance(value, Size) else value


def as_set(value: Any) -> Any:
    """Value without the mark of a derived one, which then counts as set."""
    return int(value) if isinstance(value, Size) else value


def fill_sizes(model: Any) -> None:
    """Derives the open sizes of a new `schema.Model`."""
    sizes = {
        "mlp_size": mlp_size(model.embed_size, model.activation),
        "num_kv_heads": model.num_heads,
        "head_size": _head_size(model),
    }
    _set(model, **_derive(model, **sizes))
    longest = _with_open(model.positions, max_positions=model.max_length)
    _set(model, positions=longest)
    # After head_size, which may itself be derived.
    _set(model, **_derive(model, query_scale_size=model.head_size))
    if not model.vocab_size:  # else it is set, or taken from the data
        _set(model, vocab_size=Size(VOCABULARIES["synthetic"]))
    if model.moe:
        size = _derive(model.moe, expert_size=model.mlp_size)
        _set(model, moe=dataclasses.replace(model.moe, **size))


def _head_size(model: Any) -> int:
    """Channels per head: from latent sizes, or `embed_size` over heads."""
    if model.latent:
        return model.latent.plain_size + model.rotary.size
    return model.embed_size // max(1, model.num_heads)


def mlp_size(embed_size: int, activation: str) -> int:
    """Width of a feed-forward with about 8 `embed_size`**2 parameters.

    4 `embed_size`, or 8/3 `embed_size` for the three matrices of a gated feed-forward,
    rounded up to a multiple of 256.
    """
    if activation in ("gelu", "gelu_exact"):
        return 4 * embed_size
    return -(-8 * embed_size // (3 * _MULTIPLE)) * _MULTIPLE


def fill_length_pacing(section: Any) -> None:
    """Derives start and multiple of a new section's length pacing, in tokens."""
    sizes = {"start": LENGTH_MULTIPLE, "multiple": LENGTH_MULTIPLE}
    _set(section, pacing=_with_open(section.pacing, **sizes))


def fill_difficulty_pacing(section: Any) -> None:
    """Derives start, end and multiple of the pacing of a new curriculum metric."""
    sizes = {"start": 1, "multiple": 1}
    if section.difficulty == "percentile":
        sizes["end"] = 100
    _set(section, pacing=_with_open(section.pacing, **sizes))


def fill_bucket_pacing(section: Any) -> None:
    """Derives start and multiple of the pacing of new buckets, if they are paced."""
    sizes = {"start": section.shortest, "multiple": section.shortest}
    _set(section, order=_with_pacing(section.order, **sizes))


def fill_kept_pacing(section: Any) -> None:
    """Derives start and multiple of the random-LTD pacing, in kept tokens."""
    sizes = {"start": KEPT_MULTIPLE, "multiple": KEPT_MULTIPLE}
    _set(section, pacing=_with_open(section.pacing, **sizes))


def fill_from_each_other(config: Any) -> None:
    """Derives batch, lengths, vocabulary and head of a new `schema.Config`."""
    data, model, source = config.data, config.model, config.data.source
    data = dataclasses.replace(data, **_derive(data, length=model.max_length))
    _set(config, data=data)
    if config.rl and (is_offered(size := config.global_batch_size) or not reset(size)):
        _set(config, global_batch_size=Size(config.rl.num_texts))
    warmup = _with_pacing(config.sequence_warmup, end=data.length)
    kept = {"end": data.length, "num_steps": config.num_steps}
    _set(
        config,
        sequence_warmup=warmup,
        random_ltd=_with_pacing(config.random_ltd, **kept),
    )
    if buckets := config.buckets:
        order = _with_pacing(buckets.order, end=data.length)
        _set(config, buckets=dataclasses.replace(buckets, order=order))
    has_values = config.rl and config.rl.has_values
    if has_values or getattr(config.preference, "has_rewards", False):
        _set(config, model=dataclasses.replace(model, value_head=True))
    if source in VOCABULARIES:
        size = _derive(model, vocab_size=VOCABULARIES[source])
        _set(config, model=dataclasses.replace(config.model, **size))


def _with_pacing(section: Any, **values: int) -> Any:
    """Copies a section with open settings filled in the pacing, if there is one."""
    if not (pacing := getattr(section, "pacing", None)):
        return section
    return dataclasses.replace(section, pacing=_with_open(pacing, **values))


def _with_open(section: Any, **values: int) -> Any:
    """Copies a section with derived values for open settings that the section has."""
    known = {name: x for name, x in values.items() if hasattr(section, name)}
    return dataclasses.replace(section, **_derive(section, **known))


def _derive(section: Any, **values: int) -> dict[str, Any]:
    """Marked values for the settings of a section that are not set."""
    return {
        name: Size(value)
        for name, value in values.items()
        if reset(getattr(section, name)) == 0
    }


def _set(section: Any, **values: Any) -> None:
    """Assigns settings of a frozen section under construction."""
    for name, value in values.items():
        object.__setattr__(section, name, value)  # frozen, but still under construction
