"""Converts curricula, random-LTD, progressive layer drop and sparse attention."""

from typing import Any

from zjax.deepspeed.conversion import Conversion

LTD = "data_efficiency.data_routing.random_ltd"
SAMPLING = "data_efficiency.data_sampling"
METRICS = f"{SAMPLING}.curriculum_learning.curriculum_metrics"
LENGTHS = ("seqlen", "seqlen_truncation")


def convert_efficiency(found: Conversion) -> None:
    """Converts `data_efficiency`, `curriculum_learning`, layer drop and sparsity."""
    _convert_legacy(found)
    if found.take("data_efficiency.enabled", False):
        found.skip("data_efficiency.enabled", "see its sections")
        found.copy("data_efficiency.seed", "seed", 1234, tells_default=False)
        _convert_curriculum(found)
        _convert_random_ltd(found)
    found.skip_rest("data_efficiency", "its section is off")
    _convert_layer_drop(found)
    _convert_sparsity(found)


def _convert_legacy(found: Conversion) -> None:
    """Converts the old section `curriculum_learning`."""
    section = "curriculum_learning"
    if found.take(f"{section}.enabled", False):
        found.skip(f"{section}.enabled", "see its keys")
        kind = found.take(f"{section}.curriculum_type", "seqlen")
        if kind == "seqlen":
            found.set(f"{section}.curriculum_type", sequence_warmup="truncate")
            _convert_lengths(found, section)
        else:
            found.refuse(f"{section}.curriculum_type", "use 'seqlen'")
    found.skip_rest(section, "its section is off")


def _convert_curriculum(found: Conversion) -> None:
    """Converts the metrics of `data_sampling`; all but lengths need a new index."""
    section = f"{SAMPLING}.curriculum_learning"
    is_on = found.take(f"{SAMPLING}.enabled", False)
    is_on = found.take(f"{section}.enabled", False) and is_on
    found.skip(f"{SAMPLING}.enabled", "see its sections")
    if is_on:
        found.skip(f"{section}.enabled", "see its metrics")
        for name in _names(found, METRICS):
            prefix = f"{METRICS}.{name}"
            if name in LENGTHS:
                found.settings["sequence_warmup"] = "truncate"
                _convert_lengths(found, prefix)
                found.skip_rest(prefix, "sequences are truncated; no index is needed")
            else:
                remedy = "measure it with zjax data analyze, and name its index in "
                for key in found.inside(prefix):
                    found.refuse(key, f"{remedy}curriculum.metrics")
    batching = f"{SAMPLING}.dynamic_batching"
    if found.take(f"{batching}.enabled", False):
        found.refuse(f"{batching}.enabled", "use buckets=pad, which does the same")
    found.skip_rest(SAMPLING, "the loader's settings are data.*")


def _convert_lengths(found: Conversion, section: str) -> None:
    """Converts the pacing of a metric whose difficulty is a length."""
    pacing = "sequence_warmup__pacing__"
    kind = found.take(f"{section}.schedule_type", "fixed_linear")
    kinds = {
        "fixed_linear": "linear",
        "fixed_root": "root",
        "fixed_discrete": "discrete",
    }
    if kind not in kinds:
        found.refuse(f"{section}.schedule_type", f"use one of {', '.join(kinds)}")
        return
    found.set(f"{section}.schedule_type", **{f"{pacing}kind": kinds[kind]})
    schedule = f"{section}.schedule_config"
    if kind == "fixed_discrete":
        values = found.take(f"{schedule}.difficulty", [], list) or []
        found.set(f"{schedule}.difficulty", **{f"{pacing}values": tuple(values)})
        last = found.take(f"{schedule}.max_step", [], list) or []
        found.set(f"{schedule}.max_step", **{f"{pacing}last_steps": tuple(last)})
        for name in ("min_difficulty", "max_difficulty"):
            found.skip(f"{section}.{name}", "the schedule lists its values")
        return
    names: dict[str, tuple[str, Any]] = {
        f"{section}.min_difficulty": ("start", 8),
        f"{section}.max_difficulty": ("end", 0),
        f"{schedule}.total_curriculum_step": ("num_steps", 0),
        f"{schedule}.difficulty_step": ("multiple", 8),
    }
    if kind == "fixed_root":
        names[f"{schedule}.root_degree"] = ("degree", 2)
    for key, (setting, default) in names.items():
        if value := found.take(key, default):
            found.set(key, **{f"{pacing}{setting}": value})


def _names(found: Conversion, section: str) -> list[str]:
    """Names of the sections inside a section."""
    inside = found.inside(section)
    return [*dict.fromkeys(key[len(section) + 1 :].split(".")[0] for key in inside)]


def _convert_random_ltd(found: Conversion) -> None:
    """Converts `random_ltd` of `data_routing`."""
    routing = "data_efficiency.data_routing"
    is_on = found.take(f"{routing}.enabled", False)
    is_on = found.take(f"{LTD}.enabled", False) and is_on
    found.skip(f"{routing}.enabled", "see its section")
    if not is_on:
        return
    found.set(f"{LTD}.enabled", random_ltd="layerwise")
    layers = found.take(f"{LTD}.random_ltd_layer_id", [], list)
    total = found.take(f"{LTD}.total_layer_num", 0)
    inner = range(1, total - 1) if total else ()
    named = len(layers or ()) == len(inner) and all(x in layers for x in inner)
    if layers and total and not named:
        remedy = f"use 1 to {total - 2}: all layers but the first and the last"
        found.refuse(f"{LTD}.random_ltd_layer_id", remedy)
    for name in ("random_ltd_layer_id", "random_ltd_layer_num", "total_layer_num"):
        found.skip(f"{LTD}.{name}", "all layers but the first and the last drop tokens")
    rate = f"{LTD}.layer_token_lr_schedule.enabled"
    if found.take(rate, False):
        found.refuse(rate, "leave it out; DeepSpeed refuses it, too")
    schedule = f"{LTD}.random_ltd_schedule"
    names = {
        f"{schedule}.min_value": "start",
        f"{schedule}.max_value": "end",
        f"{schedule}.schedule_config.require_steps": "num_steps",
        f"{schedule}.schedule_config.seq_per_step": "multiple",
    }
    for key, setting in names.items():
        if value := found.take(key, 0):
            found.set(key, **{f"random_ltd__pacing__{setting}": value})
    found.skip_rest(LTD, "the model says where its tokens are")


def _convert_layer_drop(found: Conversion) -> None:
    """Converts `progressive_layer_drop`."""
    section = "progressive_layer_drop"
    if found.take(f"{section}.enabled", False):
        found.skip(f"{section}.enabled", "see theta and gamma")
        for name, default in (("theta", 0.5), ("gamma", 0.001)):
            found.copy(f"{section}.{name}", f"layer_drop__{name}", default)
    found.skip_rest(section, "its section is off")


def _convert_sparsity(found: Conversion) -> None:
    """Converts `sparse_attention`."""
    section = "sparse_attention"
    if not found.given(section):
        return
    # Defaults of DeepSpeed's sparse attention, which differ from zjax's.
    mode = found.take(f"{section}.mode", "fixed")
    found.set(
        f"{section}.mode",
        default="fixed",
        model__attention="sparse",
        model__attention__pattern=mode,
    )
    found.copy(f"{section}.block", "model__attention__block", 16)
    attention = found.take(f"{section}.attention", "bidirectional")
    kind = "encoder" if attention == "bidirectional" else "decoder"
    found.set(f"{section}.attention", default=attention, model__kind=kind)
    lists = ("local_window_blocks", "global_block_indices", "global_block_end_indices")
    for key in found.inside(section):
        name = key.rpartition(".")[2]
        value = found.take(key, None, list if name in lists else int, bool)
        if isinstance(value, list):
            value = tuple(value)
        if value is not None:
            found.set(key, **{f"model__attention__pattern__{name}": value})
