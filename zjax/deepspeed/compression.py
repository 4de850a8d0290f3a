"""Sections of `compression_training`: rules of rounding, kept layers, and refusals."""

from typing import Any

from zjax.deepspeed.table import If, Meanings, Section, Values, derived, refusal

PATH = "compression_training"
WEIGHTS, ACTIVATIONS = "weight_quantization", "activation_quantization"
REMEDIES = {
    f"{PATH}.sparse_pruning": "leave it out: no masks of weights are trained",
    f"{PATH}.row_pruning": "leave it out; prune takes hidden channels away where "
    "model.mlp_size is smaller",
    f"{PATH}.head_pruning": "leave it out; prune takes heads away where "
    "model.num_heads and model.num_kv_heads are smaller",
    f"{PATH}.channel_pruning": "leave it out: no channels of convolutions are taken",
}
"""Remedies of sections that are refused if they are on."""
_RULES = "give quantize.rules with paths of zjax, such as blocks/attention/query"
_TYPES = {3: "int3", 4: "int4", 8: "int8"}
_SHARED: dict[str, dict[str, Any]] = {
    WEIGHTS: {
        "quantization_type": "symmetric",
        "rounding": "nearest",
        "schedule_offset": 0,
        "fp16_mixed_quantize.enabled": False,
    },
    ACTIVATIONS: {
        "quantization_type": "symmetric",
        "range_calibration": "dynamic",
        "schedule_offset": 0,
    },
}
"""Values of shared parameters that rules have, by section."""
_MISSING = {f"{ACTIVATIONS}.shared_parameters.schedule_offset": 1_000}
"""Values that DeepSpeed takes for missing keys where rules have others."""
_GROUP = "params.start_bits", "params.target_bits", "params.quantization_period"
_GROUP_KEYS = {
    WEIGHTS: (*_GROUP, "modules", "related_modules"),
    ACTIVATIONS: ("params.bits", "modules", "related_modules"),
}
"""Keys of a group of modules, by section."""
_BITS = {WEIGHTS: ("start_bits", "target_bits"), ACTIVATIONS: ("bits",)}


def _is_on(values: Values, section: str) -> bool:
    """Whether a section of rounding is on."""
    path = f"{PATH}.{section}.shared_parameters.enabled"
    return bool(values.found.value(path, False))


def _groups(values: Values, section: str) -> list[str]:
    """Paths of the groups of modules of a section, in order."""
    start = f"{PATH}.{section}.different_groups."
    names = (x[len(start) :] for x in values.found.inside(PATH) if x.startswith(start))
    return [start + name for name in dict.fromkeys(x.partition(".")[0] for x in names)]


def _refusals(values: Values, section: str) -> Meanings:
    """Finds the keys of a section that mean something no rule means."""
    found, refused = values.found, Meanings()
    prefix = f"{section}.shared_parameters."
    for name, allowed in _SHARED[section].items():
        key = f"{prefix}{name}"
        missing = _MISSING.get(key, allowed)
        if found.value(f"{PATH}.{key}", missing) == allowed:
            continue
        problem = "is not supported"
        if not found.given(f"{PATH}.{key}"):
            problem = f"is {missing} where it is missing, which is not supported"
        refused[key] = refusal(f"use {allowed!r}", problem)
    groups = _groups(values, section)
    for path in groups:
        short = path.removeprefix(f"{PATH}.")
        # Modules have names of torch, which are no paths of zjax.
        if found.value(f"{path}.modules", ["*"]) != ["*"] or groups[1:]:
            refused[f"{short}.modules"] = refusal(_RULES)
        bits = [found.value(f"{path}.params.{x}", 8) for x in _BITS[section]]
        known = (8,) if section == ACTIVATIONS else (*_TYPES,)
        if bits[-1] not in known:
            last = f"{short}.params.{_BITS[section][-1]}"
            refused[last] = refusal(f"use {' or '.join(map(str, known))}")
        elif bits[0] != bits[-1]:
            first = f"{short}.params.{_BITS[section][0]}"
            refused[first] = refusal(f"use {bits[-1]}, the bits at the end")
    return refused


def _rounding(values: Values) -> Meanings | str:
    """Meanings of the rounding of weights and activations, as one rule for all."""
    on = [section for section in (WEIGHTS, ACTIVATIONS) if _is_on(values, section)]
    if not on:
        return {}
    refused: Meanings = {}
    for section in on:
        refused |= _refusals(values, section)
    rule: dict[str, Any] = {"weights": "compute", "group_size": 0}
    if WEIGHTS in on:
        bits = [
            values.found.value(f"{path}.params.target_bits", 8)
            for path in _groups(values, WEIGHTS)
        ]
        rule["weights"] = _TYPES.get(bits[0] if bits else 8, "int8")
    if ACTIVATIONS in on:
        rule["activations"] = "int8"
    settings = {} if refused else {"quantize.rules": (rule,)}
    note = "each output of a matrix has a scale, and each token"
    return {
        **{
            f"{section}.shared_parameters.enabled": derived(note, settings)
            for section in on
        },
        **refused,
    }


def _rest(values: Values) -> Meanings | str:
    """Meanings of further keys of a section of rounding."""
    section = values.path.removeprefix(f"{PATH}.")
    if not _is_on(values, section):
        return "it is off"
    shared, read = "shared_parameters.", "read with quantize.rules"
    groups = (x.removeprefix(f"{values.path}.") for x in _groups(values, section))
    keys = [f"{group}.{key}" for group in groups for key in _GROUP_KEYS[section]]
    keys += [f"{shared}{name}" for name in _SHARED[section]]
    meanings: Meanings = {
        f"{shared}quantize_groups": "each output of a matrix has a scale",
        f"{shared}quantize_weight_in_forward": "the forward pass rounds matrices",
        f"{shared}quantizer_kernel": "XLA compiles the rounding",
        f"{shared}quantize_verbose": "XLA prints no rounding",
        f"{shared}fp16_mixed_quantize.quantize_change_ratio": "it is off",
    }
    return dict.fromkeys(keys, read) | (meanings if section == WEIGHTS else {})


def _layers(values: Values) -> Meanings | str:
    """Meanings of `layer_reduction`, as a start from some layers of a larger model."""
    numbers, kept = values["teacher_layer"], values["keep_number_layer"]
    refused: Meanings = {}
    if not numbers:
        refused["teacher_layer"] = refusal("name the layers to keep", "is missing")
    elif [*map(type, numbers)].count(int) < len(numbers):
        refused["teacher_layer"] = refusal("write whole numbers", "lists no numbers")
    elif numbers != sorted({*numbers}):
        problem = "copies layers in another order, and prune keeps the teacher's"
        refused["teacher_layer"] = refusal("sort them, each once", problem)
    if numbers and values.given("keep_number_layer") and kept != len(numbers):
        problem = f"is not the number of layers of teacher_layer, {len(numbers)}"
        refused["keep_number_layer"] = refusal(f"use {len(numbers)}", problem)
    teacher = "set checkpoint.init_from to the teacher, which DeepSpeed takes in code"
    settings = {
        "prune.layers": "listed",
        "prune.layers.numbers": (*numbers,),
        "model.num_layers": len(numbers),
    }
    return {
        "enabled": derived(teacher, {} if refused else settings),
        "teacher_layer": "prune.layers.numbers has them",
        "keep_number_layer": "model.num_layers has it",
        "module_name_prefix": "a built-in decoder has one list of layers",
        "other_module_name": "all weights outside of the layers are the teacher's, too",
        **refused,
    }


_REDUCTION = {
    "enabled": If(None),
    "keep_number_layer": 0,
    "module_name_prefix": "",
    "teacher_layer": [],
    "other_module_name": [],
}
SECTIONS = (
    Section(PATH, read=_rounding),
    Section(f"{PATH}.layer_reduction", _REDUCTION, _layers, off="it is off"),
    *(Section(f"{PATH}.{name}", read=_rest) for name in (WEIGHTS, ACTIVATIONS)),
)
