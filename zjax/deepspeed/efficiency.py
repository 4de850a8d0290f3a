"""Sections of curricula, random-LTD, progressive layer drop and sparse attention."""

from zjax.deepspeed.table import If, Meanings, No, Section, To, Values, refusal

ROUTING = "data_efficiency.data_routing"
LTD = f"{ROUTING}.random_ltd"
SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRICS = f"{CURRICULUM}.curriculum_metrics"
KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}
LENGTHS = ("seqlen", "seqlen_truncation")
PACING = {
    "min_difficulty": ("start", 8),
    "max_difficulty": ("end", 0),
    "schedule_config.total_curriculum_step": ("num_steps", 0),
    "schedule_config.difficulty_step": ("multiple", 8),
    "schedule_config.root_degree": ("degree", 2),
}
"""Settings of the pacing and defaults, by keys of a curriculum of lengths."""
STEPS = {
    "schedule_config.difficulty": "values",
    "schedule_config.max_step": "last_steps",
}
KEYS = {
    "schedule_type": "fixed_linear",
    **{key: default for key, (_, default) in PACING.items()},
    **{key: [] for key in STEPS},
}
DROPPED = {
    "random_ltd_schedule.min_value": "start",
    "random_ltd_schedule.max_value": "end",
    "random_ltd_schedule.schedule_config.require_steps": "num_steps",
    "random_ltd_schedule.schedule_config.seq_per_step": "multiple",
}
LISTS = ("local_window_blocks", "global_block_indices", "global_block_end_indices")
PATTERN = {key: [] for key in LISTS} | {"different_layout_per_head": False}
PATTERN |= {"horizontal_global_attention": False}
"""Defaults of keys of sparse attention, of which further ones are whole numbers."""
TRUNCATE = {"sequence_warmup": "truncate"}


def _legacy(values: Values) -> Meanings | str:
    """Meanings of the old section `curriculum_learning`."""
    if values["curriculum_type"] != "seqlen":
        return {"curriculum_type": refusal("use 'seqlen'")}
    return {"curriculum_type": TRUNCATE} | _lengths(values)


def _lengths(values: Values) -> Meanings:
    """Meanings of the pacing of a curriculum of lengths."""
    kind, pacing = values["schedule_type"], "sequence_warmup.pacing."
    if kind not in KINDS:
        return {"schedule_type": refusal(f"use one of {', '.join(KINDS)}")}
    meanings: Meanings = {"schedule_type": {f"{pacing}kind": KINDS[kind]}}
    if kind == "fixed_discrete":
        meanings |= {x: {pacing + y: tuple(values[x])} for x, y in STEPS.items()}
        why = "the schedule lists its values"
        return meanings | dict.fromkeys(("min_difficulty", "max_difficulty"), why)
    for key, (setting, _) in PACING.items():
        if values[key] and (setting != "degree" or kind == "fixed_root"):
            meanings[key] = {pacing + setting: values[key]}
    return meanings


def _is_on(values: Values, *sections: str) -> bool:
    """Whether `data_efficiency` and sections in it are on."""
    paths = ("data_efficiency", *sections)
    return all(values.found[f"{path}.enabled"] for path in paths)


def _metric(values: Values) -> Meanings | str:
    """Meanings of a metric of lengths."""
    if not _is_on(values, SAMPLING, CURRICULUM) or not values.found.given(values.path):
        return {}
    values.found.settings |= TRUNCATE
    return _lengths(values) | {"*": "sequences are truncated; no index is needed"}


def _metrics(values: Values) -> Meanings | str:
    """Meanings of metrics other than lengths, which need a new index."""
    remedy = (
        "measure it with zjax data analyze, and name its index in curriculum.metrics"
    )
    return {"*": refusal(remedy)} if _is_on(values, SAMPLING, CURRICULUM) else {}


def _sampling(values: Values) -> Meanings | str:
    """Meanings of `data_sampling`."""
    if not _is_on(values):
        return {}
    meanings: Meanings = {"enabled": "see its sections", "*": LOADED}
    if _is_on(values, SAMPLING, CURRICULUM):
        meanings["curriculum_learning.enabled"] = "see its metrics"
    if values["dynamic_batching.enabled"]:
        padded = refusal("use buckets=pad, which does the same")
        meanings["dynamic_batching.enabled"] = padded
    return meanings


def _random_ltd(values: Values) -> Meanings | str:
    """Meanings of `random_ltd`."""
    if not _is_on(values, ROUTING, LTD):
        return {}
    layers, total = values["random_ltd_layer_id"], values["total_layer_num"]
    why = "all layers but the first and the last drop tokens"
    names = ("random_ltd_layer_id", "random_ltd_layer_num", "total_layer_num")
    meanings: Meanings = {
        **dict.fromkeys(names, why),
        "enabled": {"random_ltd": "layerwise"},
        "*": "the model says where its tokens are",
    }
    if layers and total and sorted(layers) != [*range(1, total - 1)]:
        remedy = f"use 1 to {total - 2}: all layers but the first and the last"
        meanings["random_ltd_layer_id"] = refusal(remedy)
    if values["layer_token_lr_schedule.enabled"]:
        refused = refusal("leave it out; DeepSpeed refuses it, too")
        meanings["layer_token_lr_schedule.enabled"] = refused
    for key, setting in DROPPED.items():
        if values[key]:
            meanings[key] = {f"random_ltd.pacing.{setting}": values[key]}
    return meanings


def _sparsity(values: Values) -> Meanings | str:
    """Meanings of `sparse_attention`; DeepSpeed's defaults differ from zjax's."""
    if not values.given(""):
        return "it is off"
    is_encoder = values["attention"] == "bidirectional"
    sparse = {"model.attention": "sparse"}
    meanings: Meanings = {
        "mode": sparse | {"model.attention.pattern": values["mode"]},
        "attention": {"model.kind": "encoder" if is_encoder else "decoder"},
    }
    for path in values.found.inside(values.path):
        name = path.removeprefix(f"{values.path}.")
        if name not in ("mode", "attention", "block"):
            value = values.found.value(path, PATTERN.get(name, 0))
            value = tuple(value) if isinstance(value, list) else value
            meanings[name] = {f"model.attention.pattern.{name}": value}
    return meanings


LOADED = "the loader's settings are data.*"
SWITCHES = ("enabled", "curriculum_learning.enabled", "dynamic_batching.enabled")
SECTIONS = (
    Section(
        "curriculum_learning",
        {**KEYS, "enabled": If("see its keys"), "curriculum_type": "seqlen"},
        _legacy,
        rest="DeepSpeed does not use it",
    ),
    Section(
        "data_efficiency",
        {"enabled": If("see its sections"), "seed": To(1234, "seed")},
    ),
    *(Section(f"{METRICS}.{name}", KEYS, _metric) for name in LENGTHS),
    Section(METRICS, {}, _metrics),
    Section(SAMPLING, dict.fromkeys(SWITCHES, False), _sampling),
    Section(
        LTD,
        {
            **dict.fromkeys(("enabled", "layer_token_lr_schedule.enabled"), False),
            **dict.fromkeys((*DROPPED, "total_layer_num"), 0),
            "random_ltd_layer_id": [],
        },
        _random_ltd,
    ),
    Section(ROUTING, {"enabled": No("see its section", False)}),
    Section("data_efficiency", {"enabled": False}, rest="its sections are off"),
    Section(
        "progressive_layer_drop",
        {
            "enabled": If("see theta and gamma"),
            "theta": To(0.5, "layer_drop.theta"),
            "gamma": To(0.001, "layer_drop.gamma"),
        },
        rest="DeepSpeed does not use it",
    ),
    Section(
        "sparse_attention",
        {
            "mode": "fixed",
            "block": To(16, "model.attention.block"),
            "attention": "bidirectional",
        },
        _sparsity,
    ),
)
