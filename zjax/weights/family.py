"""What a family of Hugging Face checkpoints says of settings, windows and tensors."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from zjax.errors import ConfigError, Problem
from zjax.settings import schema
from zjax.settings.attention import sliding_layers
from zjax.weights.tensors import Row

REQUIRED = "required"
"""Default of a key that must be present."""


class Fault(NamedTuple):
    """Value of a JSON file that zjax does not read, without the path of the file."""

    name: str
    value: Any
    problem: str
    remedy: str = "correct it there"


def refused(name: str, value: Any, why: str) -> Fault:
    """Returns the fault of a value that zjax does not compute."""
    problem = f"is not supported: {why}"
    return Fault(name, value, problem, "use a checkpoint without it")


def check(faults: Iterable[Fault], path: pathlib.Path) -> None:
    """Raises a ConfigError with all faults of a file."""
    problems = [
        Problem(x.name, x.value, f"of {path} {x.problem}", x.remedy)
        if x.value is not REQUIRED
        else Problem(x.name, None, f"is missing from {path}", x.remedy)
        for x in faults
    ]
    if problems:
        raise ConfigError(*problems)


def wrong_type(name: str, value: Any, *kinds: type) -> Iterator[Fault]:
    """Yields a fault if a value has another type than the given types."""
    # Exact types, since True must not pass as an int; an int may stand for a float.
    is_int_for_float = type(value) is int and float in kinds
    if type(value) not in kinds and not is_int_for_float:
        yield Fault(name, value, f"is not of type {kinds[0].__name__}")


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a config.json that is a setting.

    Args:
        setting: Setting of `model`, with a dot for a setting of a section.
        kind: Type of the value.
        default: Value if the key is absent; None for a setting that zjax derives
            equally.
        is_nullable: Whether null is a value, for a setting of 0.
        names: Settings by value, where the names differ; a setting without a value is
            written as the first value.
    """

    setting: str
    kind: type
    default: Any = REQUIRED
    is_nullable: bool = False
    names: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def to_setting(self, value: Any) -> Any:
        """Converts a value to the setting."""
        if value is None:
            return 0
        return self.names[value] if self.names else self.kind(value)

    def to_value(self, setting: Any) -> Any:
        """Converts a setting to the value."""
        if self.names:
            values = (x for x, name in self.names.items() if name == setting)
            return next(values, next(iter(self.names)))
        value = self.kind(setting)
        return None if self.is_nullable and not value else value

    def faults(self, name: str, values: Mapping[str, Any]) -> Iterator[Fault]:
        """Yields a fault for a missing value, a wrong type or an unsupported value."""
        value = values.get(name, self.default)
        null = [type(None)] if self.is_nullable or self.default is None else []
        if value is REQUIRED:
            yield Fault(name, REQUIRED, "", f"add the {self.kind.__name__}")
        elif wrong := [*wrong_type(name, value, self.kind, *null)]:
            yield from wrong
        elif self.names and value not in self.names:
            yield computed_alone(name, value, self.names)


def is_accepted(value: Any, accepted: Iterable[Any]) -> bool:
    """Whether a value is one of the accepted values; 7 is 7.0, but 1 is not True."""
    is_bool = isinstance(value, bool)
    return any(value == x and is_bool == isinstance(x, bool) for x in accepted)


def computed_alone(name: str, value: Any, accepted: Iterable[Any]) -> Fault:
    """Returns the fault of a value beside the accepted values."""
    what = " or ".join(map(repr, accepted))
    return refused(name, value, f"zjax computes {what} alone")


PADDING = 1
"""Default padding id, where positions depend on the padding id."""
DROPOUTS = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
BOOKKEEPING = frozenset(
    """
    _name_or_path architectures bos_token_id eos_token_id pad_token_id unk_token_id
    torch_dtype dtype transformers_version use_cache initializer_range model_type
    pretraining_tp task_specific_params output_attentions output_hidden_states
    return_dict torchscript summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj n_ctx id2label label2id
    problem_type is_decoder is_encoder_decoder reorder_and_upcast_attn max_window_layers
    """.split()
)
"""Keys that do not change the logits of a language model, unless a family fixes a
value."""
ROTARY = {"kind": "rotary", "pairs": "halves"}

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
    return {"size": _size(values, windows), "full_attention_every": period_of(slides)}


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
    if any(slides) and period_of(slides) is None:
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


def period_of(flags: list[bool]) -> int | None:
    """Returns n if the flag of every n-th layer is False, 0 for none, else None."""
    if all(flags):
        return 0
    every = flags.index(False) + 1
    expected = [bool((number + 1) % every) for number in range(len(flags))]
    return every if flags == expected else None


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes how a kind of checkpoint becomes a decoder or an encoder.

    Args:
        prefix: Start of tensor names, missing in checkpoints without a head.
        buffers: Pattern of tensors that outputs do not depend on.
        spellings: Endings of tensor names in old checkpoints, by usual ending.
        constant: Settings of every model of the family.
        fixed: Keys with one meaning in zjax, and the values with that meaning; the
            first value is the default.
        biases: Keys of the biases of attention and of the feed-forward, False by
            default; empty if `constant` sets the biases.
        is_partial: Whether rotary positions may rotate only some channels of a head.
        theta: Base of rotary positions, if a config.json has none.
        local_theta: Base of rotary positions in sliding layers; 0 for one base in all
            layers.
        unrotated_every: Every n-th layer has no rotation, if a config.json does not
            say; 0 for a family that rotates in all layers.
        dropouts: Keys of dropout rates, by setting; a rate without a key is 0.
        default_dropout: Dropout rate if the key is absent.
        padding: Key of the padding id, or empty. Positions start at padding id + 1, so
            the key of `max_length` includes that offset.
        unread: Keys without a meaning beside other keys.
        written: Values that exports write for keys without a meaning.
        predicts_more: Whether layers behind the last layer may predict further tokens.
        aliases: Usual keys, by name in some versions of transformers.
        has_steps: Whether keys tell which layers have experts.
        is_scaled: Whether positions are scaled where a config.json does not say so.
        scalings: Usual names of kinds of scaling, by other name.
    """

    architecture: str
    rows: tuple[Row, ...]
    prefix: str
    buffers: str
    constant: Mapping[str, Any]
    keys: Mapping[str, Key]
    fixed: Mapping[str, tuple[Any, ...]]
    biases: tuple[str, ...] = ()
    is_partial: bool = False
    windows: Windows = NO_WINDOWS
    theta: float = 10_000.0
    local_theta: float = 0.0
    unrotated_every: int = 0
    dropouts: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"attention_dropout_rate": "attention_dropout"}
    )
    default_dropout: float = 0.0
    padding: str = ""
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    predicts_more: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_steps: bool = False
    is_scaled: bool = False
    scalings: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"su": "longrope"}
    )

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts."""
        return "moe" in self.constant

    @property
    def has_latents(self) -> bool:
        """Whether keys and values come from latents."""
        return self.constant["latent"] is not None

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotations, with keys for base and scaling."""
        return self.constant["positions"] == ROTARY

    @property
    def free(self) -> frozenset[str]:
        """Settings of a run that neither weights nor other keys depend on."""
        return frozenset({"max_length"} if self.is_rotary else ())

    def derived(
        self, architecture: str, *, defaults: Mapping[str, Any] = {}, **changes: Any
    ) -> "Family":
        """Returns a family with other values, and with changes of the tables.

        `defaults` are of keys of a config.json; a key of None is left out.
        """
        for table in {"constant", "keys", "fixed"} & {*changes}:
            changes[table] = {**getattr(self, table), **changes[table]}
        keys = changes.get("keys", self.keys)
        changes["keys"] = {
            name: dataclasses.replace(key, default=defaults.get(name, key.default))
            for name, key in keys.items()
            if key is not None
        }
        return dataclasses.replace(self, architecture=architecture, **changes)
