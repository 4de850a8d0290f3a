"""Sections of curricula, random-LTD, progressive layer drop and sparse attention."""

from zjax.deepspeed.table import If, Meanings, No, Section, To, Values, refusal

ROUTING = "data_efficiency.data_routing"
LTD = f"{ROUTING}.random_ltd"
SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRICS = f"{CURRICULUM}.curriculum_metrics"
KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}
PACING, RISING = "sequence_warmup.pacing.", ["fixed_linear", "fixed_root"]
LENGTH_KEYS = {
    "schedule_type": "fixed_linear",
    "min_difficulty": To(8, f"{PACING}start", RISING, 1),
    "max_difficulty": To(0, f"{PACING}end", RISING, 1),
    "schedule_config.total_curriculum_step": To(0, f"{PACING}num_steps", RISING, 1),
    "schedule_config.difficulty_step": To(8, f"{PACING}multiple", RISING, 1),
    "schedule_config.root_degree": To(2, f"{PACING}degree", RISING[1:], 1),
    "schedule_config.difficulty": To([], f"{PACING}values", ["fixed_discrete"]),
    "schedule_config.max_step": To([], f"{PACING}last_steps", ["fixed_discrete"]),
}
"""Keys of a curriculum of lengths."""
SCHEDULE, DROPPED, ON = "random_ltd_schedule.", "random_ltd.pacing.", ["on"]
LISTS = ("local_window_blocks", "global_block_indices", "global_block_end_indices")
PATTERN = {key: [] for key in LISTS} | {"different_layout_per_head": False}
PATTERN |= {"horizontal_global_attention": False}
"""Defaults of keys of sparse attention; all keys without one are whole numbers."""
TRUNCATE = {"sequence_warmup": "truncate"}


def _legacy(values: Values) -> Meanings | str:
    """Meanings of the old section `curriculum_learning`."""
    if values["curriculum_type"] != "seqlen":
        return {"curriculum_type": refusal("use 'seqlen'")}
    return {"curriculum_type": TRUNCATE} | _lengths(values)


def _lengths(values: Values) -> Meanings:
    """Meanings of the pacing of a curriculum of lengths."""
    kind = values["schedule_type"]
    if kind not in KINDS:
        return {"schedule_type": refusal(f"use one of {', '.join(KINDS)}")}
    meanings: Meanings = {"schedule_type": {f"{PACING}kind": KINDS[kind]}}
    if kind == "fixed_discrete":
        why = "the schedule lists its values"
        meanings |= dict.fromkeys(("min_difficulty", "max_difficulty"), why)
    return meanings


def _is_on(values: Values, *sections: str) -> bool:
    """Whether `data_efficiency` and sections in it are on."""
    paths = ("data_efficiency", *sections)
    return all(values.found[f"{path}.enabled"] for path in paths)


def _metric_kind(values: Values) -> str:
    """Type of the schedule of a metric of lengths; empty if the metric is off."""
    is_on = _is_on(values, SAMPLING, CURRICULUM) and values.given("")
    return values["schedule_type"] if is_on else ""


def _metric(values: Values) -> Meanings | str:
    """Meanings of a metric of lengths."""
    if not _metric_kind(values):
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
    are_numbers = all(isinstance(x, int | float) for x in layers)
    # A list in a file is short; a range of layers may not be.
    is_complete = are_numbers and len(layers) == total - 2
    is_complete = is_complete and sorted(layers) == [*range(1, total - 1)]
    if layers and total and not is_complete:
        remedy = f"use 1 to {total - 2}: all layers but the first and the last"
        meanings["random_ltd_layer_id"] = refusal(remedy)
    if values["layer_token_lr_schedule.enabled"]:
        refused = refusal("leave it out; DeepSpeed refuses it, too")
        meanings["layer_token_lr_schedule.enabled"] = refused
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
        {**LENGTH_KEYS, "enabled": If("see its keys"), "curriculum_type": "seqlen"},
        _legacy,
        kind=lambda values: values["schedule_type"],
        rest="DeepSpeed does not use it",
    ),
    Section(
        "data_efficiency",
        {"enabled": If("see its sections"), "seed": To(1234, "seed")},
    ),
    *(
        Section(f"{METRICS}.{name}", LENGTH_KEYS, _metric, kind=_metric_kind)
        for name in ("seqlen", "seqlen_truncation")
    ),
    Section(METRICS, {}, _metrics),
    Section(SAMPLING, dict.fromkeys(SWITCHES, False), _sampling),
    Section(
        LTD,
        {
            **dict.fromkeys(("enabled", "layer_token_lr_schedule.enabled"), False),
            "random_ltd_layer_id": [],
            "total_layer_num": 0,
            f"{SCHEDULE}min_value": To(0, f"{DROPPED}start", ON, 1),
            f"{SCHEDULE}max_value": To(0, f"{DROPPED}end", ON, 1),
            f"{SCHEDULE}schedule_config.require_steps": To(
                0, f"{DROPPED}num_steps", ON, 1
            ),
            f"{SCHEDULE}schedule_config.seq_per_step": To(
                0, f"{DROPPED}multiple", ON, 1
            ),
        },
        _random_ltd,
        kind=lambda values: "on" if _is_on(values, ROUTING, LTD) else "",
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
