"""Sliding windows of a Hugging Face config.json: size, and layers with a window.

A family has windows in no layer, in all layers, in all layers behind a switch (Qwen),
or in all but every n-th layer (Gemma).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from zjax.settings import schema
from zjax.settings.attention import sliding_layers
from zjax.weights.keys import Fault, refused, wrong_type

KNOWN = {"layer_types"}
"""Keys that any family may have."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIRST_OF_SWITCH = 28
"""First layer with a window, if a switch is on and the config.json names no layer."""


class Windows(NamedTuple):
    """Rule of a family for layers with a window."""

    layers: Literal["none", "all", "switch", "period"] = "none"
    default: int | None = None
    """Size if the config.json has none."""
    period: int = 0
    """Every n-th layer has full attention, if the config.json does not say."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of a config.json that are read besides the types of layers."""
        keys = {
            "none": (),
            "all": ("sliding_window",),
            "switch": ("sliding_window", "use_sliding_window", "max_window_layers"),
            "period": ("sliding_window", "sliding_window_pattern"),
        }
        return frozenset(keys[self.layers])


NO_WINDOWS = Windows()


def window_settings(
    values: Mapping[str, Any], windows: Windows, num_layers: int
) -> dict[str, Any] | None:
    """Settings of `model.window` from a config.json without problems."""
    slides = _slides(values, windows, num_layers)
    if not any(slides):
        return None
    return {"size": _size(values, windows), "full_attention_every": _period(slides)}


def window_values(model: schema.Model, windows: Windows) -> dict[str, Any]:
    """Keys of a config.json, as far as the family can express windows."""
    if windows.layers == "none":
        return {}
    # null means no window.
    values: dict[str, Any] = {"sliding_window": model.window_size or None}
    if windows.layers == "all":
        return values
    slides = sliding_layers(model)
    if windows.layers == "switch":
        values["use_sliding_window"] = any(slides)
        # Windows begin at this layer, in spite of the name.
        values["max_window_layers"] = 0 if any(slides) else model.num_layers
    return values | {"layer_types": [_SLIDING if x else _FULL for x in slides]}


def window_faults(
    values: Mapping[str, Any], windows: Windows, num_layers: Any
) -> Iterator[Fault]:
    """Yields wrong types, and windows that zjax does not compute."""
    types, known = values.get("layer_types"), (_FULL, _SLIDING)
    if windows.layers == "none":
        yield from _other_types(values, _FULL)
        return
    numbers = {"sliding_window": (int, type(None)), "sliding_window_pattern": (int,)}
    numbers |= {"use_sliding_window": (bool,), "max_window_layers": (int,)}
    given = {
        name: numbers[name] for name in numbers if name in {*values} & windows.keys
    }
    wrong = [x for name in given for x in wrong_type(name, values[name], *given[name])]
    yield from wrong
    if type(num_layers) is not int or wrong:
        return  # reported already
    period = values.get("sliding_window_pattern", 1)
    if windows.layers == "period" and period < 1:
        yield Fault("sliding_window_pattern", period, "is no number of layers")
        return
    if windows.layers != "all" and types is not None:
        is_list = isinstance(types, list) and len(types) == num_layers
        if not is_list or any(kind not in known for kind in types):
            problem = f"is not one of {_FULL}, {_SLIDING} for each layer"
            yield Fault("layer_types", types, problem)
            return
    if windows.layers == "all":
        yield from _other_types(values, _SLIDING if _size(values, windows) else _FULL)
        return
    slides = _slides(values, windows, num_layers)
    if any(slides) and _period(slides) is None:
        name = "max_window_layers" if types is None else "layer_types"
        why = "zjax computes windows in all layers, or all but every n-th"
        yield refused(name, values.get(name), why)


def _other_types(values: Mapping[str, Any], kind: str) -> Iterator[Fault]:
    """Yields a fault if a layer is of another type than the family's layers."""
    types = values.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or any(each != kind for each in types):
        name = kind.replace("_", " ")
        yield refused("layer_types", types, f"its family has {name} in all layers here")


def _size(values: Mapping[str, Any], windows: Windows) -> int | None:
    return values.get("sliding_window", windows.default)


def _slides(values, windows, num_layers) -> list[bool]:
    """Whether a layer has a window, for each layer."""
    types = values.get("layer_types")
    none, numbers = [False] * num_layers, range(num_layers)
    if windows.layers == "none" or not _size(values, windows):
        return none
    if windows.layers == "all":
        return [True] * num_layers
    if windows.layers == "switch" and not values.get("use_sliding_window", False):
        return none
    if types is not None:
        # New checkpoints list the types of layers, which replaces the older keys.
        return [kind == _SLIDING for kind in types]
    if windows.layers == "switch":
        first = values.get("max_window_layers", _FIRST_OF_SWITCH)
        return [number >= first for number in numbers]
    period = values.get("sliding_window_pattern", windows.period)
    # Every n-th layer, counted from 1, has full attention.
    return [bool((number + 1) % period) for number in numbers]


def _period(slides: list[bool]) -> int | None:
    """Returns n if every n-th layer has full attention, 0 for no layer, else None."""
    if all(slides):
        return 0
    every = slides.index(False) + 1
    expected = [bool((number + 1) % every) for number in range(len(slides))]
    return every if slides == expected else None
