"""Settings that follow from others where they are not set.

They are written as 0, or as the word `derived`. A section fills them in when it is
made, so that all who read it find values. These are marked: a change of what they
follow from changes them too, and a text can say which they are.
"""

import dataclasses
from typing import Any

DERIVED = "derived"
"""How a name that follows from other settings is written."""
VOCABULARIES = {"standard_library": 257, "synthetic": 50_257}
"""By `data.source`: of bytes, and of GPT-2, also where nothing else is known."""
_MULTIPLE = 256
"""Of which the width of a gated feed-forward is one (arXiv:2302.13971)."""
_MEMORIES = {
    "device": ("device", "device", "device"),
    "pinned_host": ("pinned_host", "pinned_host", "device"),
    "nvme": ("nvme", "pinned_host", "pinned_host"),
    "auto": ("auto", "device", "device"),
}
"""Of optimizer state, of gradients and of parameters, under `zero.memory`."""


class Size(int):
    """A number that follows from other settings."""


class Name(str):
    """A name that follows from other settings."""

    __slots__ = ()


def is_derived(value: Any) -> bool:
    """Whether a setting of a section follows from others.

    Args:
        value: Its value.

    Returns:
        False for what was set.
    """
    return isinstance(value, Size | Name)


def as_written(value: Any) -> Any:
    """A setting as a config file has it.

    Args:
        value: Its value in a section.

    Returns:
        0 or `derived` for what follows from others; else the value.

    Example:
        >>> as_written(Size(3)), as_written(Name("device")), as_written(3)
        (0, 'derived', 3)
    """
    if isinstance(value, Size):
        return 0
    return DERIVED if isinstance(value, Name) else value


def as_set(value: Any) -> Any:
    """A value that is set, wherever it was read.

    Args:
        value: Such as the `data.length` of another config.

    Returns:
        The same value, which no longer follows from others.

    Example:
        >>> as_written(as_set(Size(3)))
        3
    """
    if isinstance(value, Size):
        return int(value)
    return f"{value}" if isinstance(value, Name) else value


def fill_sizes(model: Any) -> None:
    """Gives a new `schema.Model` the sizes that follow from others of it.

    Args:
        model: The section.
    """
    width = mlp_size(model.embed_size, model.activation)
    _set(model, **_open(model, mlp_size=width, num_kv_heads=model.num_heads))
    if not model.vocab_size:  # else it is set, or what the data says
        _set(model, vocab_size=Size(VOCABULARIES["synthetic"]))


def mlp_size(embed_size: int, activation: str) -> int:
    """The width of a feed-forward that has about 8 parameters per square of the stream.

    Args:
        embed_size: Width of the stream.
        activation: `swiglu` has three matrices, others have two.

    Returns:
        4 times the stream; for three matrices 8/3 of it, up to a multiple of 256.

    Example:
        >>> mlp_size(768, "gelu"), mlp_size(4_096, "swiglu")
        (3072, 11008)
    """
    if activation != "swiglu":
        return 4 * embed_size
    return -(-8 * embed_size // (3 * _MULTIPLE)) * _MULTIPLE


def fill_memories(zero: Any) -> None:
    """Gives a new `schema.Zero` the memories that follow from its `memory`.

    Nothing leaves the devices where the optimizer state is to stay there.

    Args:
        zero: The section.
    """
    stays = as_written(zero.optimizer_memory) == "device"
    names = "optimizer_memory", "gradient_memory", "parameter_memory"
    memories = _MEMORIES["device" if stays else zero.memory]
    _set(zero, **_open(zero, **dict(zip(names, memories, strict=True))))


def fill_from_each_other(config: Any) -> None:
    """Gives a new `schema.Config` what its model and its data say of each other.

    Args:
        config: All sections.
    """
    data, model, source = config.data, config.model, config.data.source
    length = _open(data, length=model.max_length)
    _set(config, data=dataclasses.replace(data, **length))
    if source in VOCABULARIES:
        size = _open(model, vocab_size=VOCABULARIES[source])
        _set(config, model=dataclasses.replace(model, **size))


def _open(section: Any, **values: int | str) -> dict[str, Any]:
    """Those of the values that are not set, marked."""
    return {
        name: Name(value) if isinstance(value, str) else Size(value)
        for name, value in values.items()
        if as_written(getattr(section, name)) in (0, DERIVED)
    }


def _set(section: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(section, name, value)  # it is frozen, but not yet in use
