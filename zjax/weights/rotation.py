"""Rotary positions of a Hugging Face config.json, with keys of old and new versions."""

from collections.abc import Iterator, Mapping
from typing import Any

from zjax.ops.rotary import attention_factor
from zjax.settings import choices, mappings, schema
from zjax.settings.attention import rotated_layers
from zjax.weights.family import Family, Fault, period_of, refused, wrong_type

MAPPINGS = ("rope_parameters", "rope_scaling")
"""Keys of a mapping that may scale rotary positions, in new and old checkpoints."""
_KINDS: Mapping[str, Any] = choices.kinds(schema.RopeScaling)
PARTIAL = "partial_rotary_factor"
_LOCAL = "rope_local_base_freq"
ROTATED, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"
"""Keys for the layers that rotate, 1 in spite of the name, and the period of others."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SCALED = {
    "linear": {},
    "dynamic": {},
    "llama3": {
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "longrope": {"attention_factor": "attention_factor"},
}
"""Settings of each kind of scaling besides the factor, by key."""
_LISTS = {"short_factor": "short_factors", "long_factor": "long_factors"}
"""Settings of longrope that are lists, by key."""
_ORIGINAL = "original_max_position_embeddings"
_SCALES = {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
"""Settings of yarn, by key, in families with latents; no other family scales scores."""
_ANY = {"rope_type", "type", "rope_theta", PARTIAL, "factor", _ORIGINAL}
KNOWN = {*MAPPINGS, "rope_theta", PARTIAL, _ORIGINAL, _LOCAL, ROTATED, _INTERVAL}
"""Keys of a config.json that this module reads."""


def rotation_settings(
    values: Mapping[str, Any], family: Family, model: schema.Model
) -> dict[str, Any]:
    """Settings of rotary positions from a config.json without problems."""
    rope, length = _rope(values), model.rotary.max_positions
    kind, share = _kind(rope, family), _partial(values, rope)
    scaling = dict[str, Any]()
    if kind != "default":
        scaling = mappings.to_mapping(_KINDS[kind]())
        for theirs, ours in _numbers(kind, family).items():
            if rope.get(theirs) is not None:
                scaling[ours] = float(rope[theirs])
    if kind == "yarn":
        if scaling["attention_factor"] or not scaling["mscale_all_dim"]:
            scaling["mscale"] = 0.0  # transformers ignores it then
        # Absent and null mean true.
        scaling["truncate"] = rope.get("truncate") is not False
    if kind in ("yarn", "llama3", "longrope"):
        # Absent where the original length is the length of the checkpoint.
        given = values.get(_ORIGINAL) or rope.get(_ORIGINAL)
        scaling["original_length"] = given or length
    if kind == "dynamic":
        scaling["original_length"] = length
    if kind == "longrope":
        lists = {ours: rope.get(theirs, ()) for theirs, ours in _LISTS.items()}
        scaling |= {name: tuple(map(float, x)) for name, x in lists.items()}
    if kind != "default":
        factor = rope.get("factor")
        # transformers derives an absent factor from the lengths.
        usual = length / scaling["original_length"] if factor is None else factor
        scaling["factor"] = float(usual)
    return {
        "theta": float(_theta(values, rope, family)),
        "scaling": scaling or None,
        "unrotated_every": _unrotated_every(values, family),
        "size": model.rotary.size
        if share == 1.0
        # Rounded as in transformers.
        else int(model.head_size * share),
    }


def rotation_values(model: schema.Model, family: Family) -> dict[str, Any]:
    """Keys of a config.json that all versions of transformers read."""
    # Old keys, which new versions read, too.
    values: dict[str, Any] = {"rope_theta": model.rotary.theta}
    if family.local_theta and model.window:
        values[_LOCAL] = model.window.rope_theta
    if model.rotary.size and family.is_partial:
        values[PARTIAL] = model.rotary.size / model.head_size
    if family.unrotated_every:
        values[ROTATED] = [int(x) for x in rotated_layers(model)]
    scaling = model.rotary.scaling
    if scaling is None:
        # Without this mapping, the library would scale.
        unscaled = {"rope_scaling": {"rope_type": "default"}}
        return values | (unscaled if family.is_scaled else {})
    rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    for theirs, ours in _numbers(scaling.kind, family).items():
        if value := getattr(scaling, ours):
            rope[theirs] = value
    if isinstance(scaling, schema.Yarn) and not scaling.truncate:
        rope["truncate"] = False
    if isinstance(scaling, schema.Yarn | schema.Llama3 | schema.Longrope):
        rope[_ORIGINAL] = scaling.original_length
    if isinstance(scaling, schema.Longrope):
        rope |= {theirs: [*getattr(scaling, x)] for theirs, x in _LISTS.items()}
        values[_ORIGINAL] = scaling.original_length
        if model.rotary.max_positions != scaling.factor * scaling.original_length:
            # Some versions take another factor from these lengths.
            rope["attention_factor"] = attention_factor(scaling)
    return values | {"rope_scaling": rope}


def rotation_faults(values: Mapping[str, Any], family: Family) -> Iterator[Fault]:
    """Yields wrong types, and rotary positions that zjax does not compute."""
    rope, name = _rope(values), _name(values)
    kind = _kind(rope, family)
    for key in MAPPINGS:
        if not isinstance(values.get(key), dict | None):
            yield Fault(key, values[key], "is not an object")
    if family.is_scaled and not rope:
        problem = "leaves the scaling of positions to the library"
        yield Fault(name, values.get(name), problem, "write it there")
    if kind not in ("default", *_SCALED):
        why = f"zjax computes the scaling of {', '.join(_SCALED)}"
        yield refused(name, values[name], why)
    elif kind != "default":
        yield from _wrong_numbers(values, rope, kind, family)
        known = _numbers(kind, family)
        is_read = kind == "yarn" or family.has_latents
        for key in _SCALES if is_read else ():
            if key not in known and rope.get(key) is not None:
                why = f"zjax computes {kind} without it"
                yield refused(f"{name}.{key}", rope[key], why)
    share = _partial(values, rope)
    if type(share) not in (int, float) or not 0 < share <= 1:
        yield Fault(PARTIAL, share, "is no share of channels")
    elif share != 1 and not family.is_partial:
        yield refused(PARTIAL, share, "zjax computes 1.0 alone")
    yield from wrong_type("rope_theta", _theta(values, rope, family), float)
    yield from wrong_type(_LOCAL, local_theta(values, family), float)
    if family.unrotated_every:
        yield from _wrong_layers(values, family)
    local = _local(values)
    if _kind(local, family) != "default":
        why = "zjax computes no scaling in sliding layers"
        yield refused(f"{name}.{_SLIDING}", local, why)


def _wrong_layers(values: Mapping[str, Any], family: Family) -> Iterator[Fault]:
    """Yields rotated layers that are no list of the layers, or have no period."""
    given, number = values.get(ROTATED), values.get("num_hidden_layers")
    name = _INTERVAL if given is None else ROTATED
    if type(number) is not int:
        return  # reported already
    if given is None:
        if wrong := [*wrong_type(_INTERVAL, values.get(_INTERVAL, 1), int)]:
            yield from wrong
            return
    elif not isinstance(given, list) or any(x not in (0, 1) for x in given):
        yield Fault(ROTATED, given, "is no list of 0 and 1")
        return
    elif len(given) != number:
        yield Fault(ROTATED, given, f"does not name {number} layers")
        return
    every = _unrotated_every(values, family)
    if every is None or every < 0 or every == 1:
        why = "zjax rotates in all layers, or all but every n-th from 2 on"
        yield refused(name, values.get(name), why)


def _unrotated_every(values: Mapping[str, Any], family: Family) -> int | None:
    """Returns n if every n-th layer does not rotate, 0 for none, else None."""
    if not family.unrotated_every:
        return 0
    given = values.get(ROTATED)
    if given is None:
        every = values.get(_INTERVAL, family.unrotated_every)
        return every if every <= values["num_hidden_layers"] else 0
    return period_of([*map(bool, given)])


def unknown_keys(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Keys of rotary positions that are not read."""
    rope, name = _rope(values), _name(values)
    if not family.unrotated_every:
        rope = {**rope, **{x: values[x] for x in (ROTATED, _INTERVAL) if x in values}}
    if _LOCAL in values and not family.local_theta:
        rope = {**rope, _LOCAL: values[_LOCAL]}
    known = {*_ANY, "truncate", *_SCALED.get(_kind(rope, family), ()), *_SCALES}
    known |= {*_LISTS} if _kind(rope, family) == "longrope" else set()
    return {f"{name}.{key}": x for key, x in rope.items() if key not in known}


def _numbers(kind: str, family: Family) -> dict[str, str]:
    """Settings of a kind of scaling besides the factor, by key."""
    has_scales = kind == "yarn" and family.has_latents
    return _SCALED[kind] | (_SCALES if has_scales else {})


def _wrong_numbers(
    values: Mapping[str, Any], rope: Mapping[str, Any], kind: str, family: Family
) -> Iterator[Fault]:
    """Yields a fault for each wrong number or list of a scaling."""
    name = _name(values)
    for key in ("factor", *_numbers(kind, family)):
        # longrope derives a factor from lengths; llama3 has no defaults.
        is_needed = (key == "factor" and kind != "longrope") or kind == "llama3"
        null = () if is_needed else (type(None),)
        yield from wrong_type(f"{name}.{key}", rope.get(key), float, *null)
    for key in _LISTS if kind == "longrope" else ():
        given = rope.get(key)
        if not isinstance(given, list) or any(
            type(x) not in (int, float) for x in given
        ):
            yield Fault(f"{name}.{key}", given, "is no list of numbers")
    yield from wrong_type(f"{name}.truncate", rope.get("truncate"), bool, type(None))
    for key, holder in ((f"{name}.{_ORIGINAL}", rope), (_ORIGINAL, values)):
        given = holder.get(_ORIGINAL)
        if given is not None and (type(given) is not int or given < 2):
            yield Fault(key, given, "is no int above 1")


def _name(values: Mapping[str, Any]) -> str:
    """Name of the mapping in a config.json; the first name if there is none."""
    return next((x for x in MAPPINGS if isinstance(values.get(x), dict)), MAPPINGS[0])


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mapping for all layers, or for layers with full attention."""
    found = values.get(_name(values))
    found = found if isinstance(found, dict) else {}
    return found[_FULL] if isinstance(found.get(_FULL), dict) else found


def _local(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mapping for sliding layers, in new checkpoints."""
    found = values.get(_name(values))
    found = found.get(_SLIDING) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def local_theta(values: Mapping[str, Any], family: Family) -> Any:
    """Base of rotary positions in sliding layers; 0 for a family with one base."""
    if not family.local_theta:
        return 0.0
    given = values.get(_LOCAL, family.local_theta)
    return _local(values).get("rope_theta", given)


def _kind(rope: Mapping[str, Any], family: Family) -> Any:
    """Kind of scaling by usual name; old checkpoints have the key `type`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return family.scalings.get(kind, kind) if isinstance(kind, str) else kind


def _theta(values: Mapping[str, Any], rope: Mapping[str, Any], family: Family) -> Any:
    return rope.get("rope_theta", values.get("rope_theta", family.theta))


def _partial(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    return rope.get(PARTIAL, values.get(PARTIAL, 1.0))
