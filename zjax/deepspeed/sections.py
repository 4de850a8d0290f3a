"""Reads a ds_config.json by the table of all sections, and formats the conversion."""

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zjax import files
from zjax.deepspeed import (
    batch,
    compression,
    efficiency,
    optimizer,
    precision,
    table,
    zero,
)
from zjax.deepspeed.reading import read_file
from zjax.errors import ConfigError, Problem
from zjax.settings.derived import is_offered
from zjax.settings.mappings import merge

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "csv"}
FILES = {"enabled": table.If(None), "output_path": "", "job_name": ""}
NO_EFFECT = {
    "wall_clock_breakdown": "metrics have the seconds of a step; see observe.profile",
    "memory_breakdown": "zjax plan prints the memory of every array",
    "dump_state": "zjax train prints its settings",
    "log_level": "absl flags set it, as --verbosity=1",
    "zero_allow_untested_optimizer": "ZeRO shards the state of any optimizer",
    "zero_force_ds_cpu_optimizer": "updates run on the device",
    "managed_gradient_accumulation": "a step has all microbatches",
    "disable_allgather": "XLA chooses the messages",
    "allgather_size": "XLA combines the messages",
    "vocabulary_size": "the model has it",
    "graph_harvesting": "XLA compiles the step",
    "dataloader_drop_last": "each batch has global_batch_size rows",
}
COMPILE = (
    *("deepcompile", "free_activation", "offload_activation", "offload_opt_states"),
    *("offload_activation_pin_memory", "double_buffer", "symmetric_memory"),
    *("debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce"),
    *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
    "keep_all_input_tensors",
)
COMET = ("project", "workspace", "api_key", "experiment_name", "experiment_key")
COMET += ("online", "mode")
WANDB = {"enabled": table.If(None), "group": None, "team": None, "project": ""}
TUNED = table.derived("zjax tune --ds_config=FILE tries what it would try")
UNREAD = {
    "comms_logger": "zjax plan --collectives lists what a step sends",
    "flops_profiler": "metrics have mfu; observe.profile takes a trace",
    "timers.throughput": "metrics have the seconds of each step",
    "timers": "metrics have the seconds of each step",
    "compile": "XLA compiles the step",
    "datastates_ckpt": "checkpoints are written in the background",
    "data_types": "masters are float32, or as precision.master_dtype says",
}
"""Reasons why sections are not needed."""
CHECKED = {
    "comms_logger": dict.fromkeys(("enabled", "verbose", "debug"), False)
    | {"prof_all": True, "prof_ops": []},
    "timers.throughput": {"enabled": True, "synchronized": True},
    "compile": dict.fromkeys(COMPILE, False)
    | {"free_activation_threshold": 10_485_760, "passes": None},
    "comet": {"enabled": False, "samples_log_interval": 100} | dict.fromkeys(COMET),
}
"""Keys of sections that are not read, which DeepSpeed checks."""
UNSUPPORTED = {
    "amp": "use bf16.enabled",
    "nebula": "leave it out: checkpoints are written in the background",
    **compression.REMEDIES,
    "quantize_training": "leave it out",
    "weight_quantization": "leave it out",
    "eigenvalue": "leave it out",
    "comet": "use tensorboard, wandb or csv_monitor",
}
"""Remedies of sections that are refused if they are on."""
HYBRID = {
    "enabled": table.If("zjax rl draws texts with the weights of the run"),
    "max_out_tokens": 512,
    "inference_tp_size": 1,
    "release_inference_cache": False,
    "pin_parameters": True,
    "tp_gather_partition_size": 8,
    "enable_cuda_graph": False,
}
"""Keys of the engine that trains and writes texts in turn, for PPO."""
ON_BY_DEFAULT = ("weight_quantization",)
"""Sections of `UNSUPPORTED` that are on unless the file turns them off."""


def _sink(values: table.Values) -> table.Meanings | str:
    """Meanings of a section of a metric sink."""
    sinks = [
        sink for section, sink in SINKS.items() if values.found[f"{section}.enabled"]
    ]
    written = table.derived("metrics are written to the directory of the run")
    meanings: table.Meanings = {
        # The setting replaces the default, which has the first two.
        "enabled": {"observe.sinks": ("console", "jsonl", *sinks)},
    }
    if values.path == "wandb" and values["project"]:
        meanings["project"] = {"observe.project": values["project"]}
    return meanings | dict.fromkeys(("output_path", "job_name"), written)


def _unsupported(values: table.Values) -> table.Meanings | str:
    """Meaning of a section that is refused, as a whole, if a switch in it is on."""
    found, name = values.found, values.path
    inside = found.inside(name)
    switches = [
        found.is_auto(key) or found.value(key, False)
        for key in inside
        if key.endswith("enabled")
    ]
    is_on = any(switches) or (name in ON_BY_DEFAULT and not switches)
    if not is_on or not found.given(name):
        return "it is off"
    found.need(name, "is not supported", UNSUPPORTED[name])
    refused = table.Outcome("not supported", UNSUPPORTED[name])
    return {"": refused, "*": refused}


def _hybrid(values: table.Values) -> table.Meanings | str:
    """Meanings of `hybrid_engine`."""
    if not values["enabled"]:
        return {}
    meanings: table.Meanings = {
        "max_out_tokens": "pages of keys grow with a text; rl.rollout has its length",
        "inference_tp_size": "texts are drawn on the mesh of the run",
        "release_inference_cache": "keys are freed before each update",
        "pin_parameters": "weights stay where the plan of the run stores them",
        "tp_gather_partition_size": "XLA combines the messages",
        "enable_cuda_graph": "XLA compiles each pass",
    }
    if values["inference_tp_size"] > 1:
        refused = table.refusal("set mesh.tensor, for training and generation")
        meanings["inference_tp_size"] = refused
    return meanings


def _checkpoint(values: table.Values) -> table.Meanings | str:
    """Meanings of `checkpoint`."""
    modes, why = ("ignore", "warn", "fail"), "a checkpoint opens on any mesh"
    unknown = table.refusal(f"use one of {', '.join(modes)}", "is not a choice")
    known = values["tag_validation"].lower() in modes
    return {"tag_validation": why if known else unknown, "*": why}


SECTIONS = (
    *(
        table.Section(
            name,
            WANDB if name == "wandb" else FILES,
            _sink,
            rest=table.refusal("leave it out"),
            is_strict=True,
        )
        for name in SINKS
    ),
    table.Section("autotuning", rest=TUNED),
    *(
        table.Section(
            name, CHECKED.get(name, {}), _unsupported, is_strict=name in CHECKED
        )
        for name in UNSUPPORTED
    ),
    table.Section("hybrid_engine", HYBRID, _hybrid, is_strict=True),
    table.Section("checkpoint", {"tag_validation": "warn"}, _checkpoint),
    *(
        table.Section(name, CHECKED.get(name, {}), rest=why, is_strict=name in CHECKED)
        for name, why in UNREAD.items()
    ),
    table.Section("", {key: table.No(why) for key, why in NO_EFFECT.items()}),
)


TABLE = (
    *batch.SECTIONS,
    *optimizer.SECTIONS,
    *precision.SECTIONS,
    *zero.SECTIONS,
    *efficiency.SECTIONS,
    *SECTIONS,
    *compression.SECTIONS,
)
"""Sections of a ds_config, in the order in which settings are made."""
THEIRS = (
    *(*batch.SIZES, "gradient_clipping", "steps_per_print"),
    *("scheduler", "fp16", "bf16", zero.ZERO),
)
"""Keys of DeepSpeed that are not settings of zjax."""


def convert(values: Any) -> table.Conversion:
    """Converts the keys and values of a ds_config as DeepSpeed 0.19 reads it."""
    if not isinstance(values, Mapping):
        remedy = "give the keys and values of a ds_config.json"
        problem = f"is a {type(values).__name__}"
        raise ConfigError(Problem("ds_config", values, problem, remedy))
    return table.Conversion(values, TABLE)


def read(path: str | os.PathLike[str]) -> table.Conversion:
    """Reads and converts a ds_config.json."""
    return convert(read_file(pathlib.Path(files.local_path("ds_config", path))))


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Nested settings of a ds_config.json; raises all problems of the file at once."""
    found = read(path)
    if problems := found.problems():
        raise ConfigError(*problems)
    return merge({}, found.settings)


def check_optimizer_is_given(source: Any) -> None:
    """Refuses an optimizer or scheduler that a user's optimizer replaces.

    Sources of settings other than a ds_config.json pass.
    """
    is_path = isinstance(source, str | os.PathLike)
    if not is_path or pathlib.PurePath(os.fspath(source)).suffix != ".json":
        return
    found = read(source)
    sections = [name for name in ("optimizer", "scheduler") if found.given(name)]
    for name in sections:
        problem = "has no effect on the optimizer that was given"
        remedy = "leave the section out, or give None as the optimizer"
        found.need(name, problem, remedy)
    if sections:
        raise ConfigError(*found.problems())


def config_file(found: table.Conversion) -> str:
    """Formats the settings as a Python config file for `zjax train --config`."""
    lines = [
        "from zjax.config import base",
        "",
        "",
        "def get_config():",
        "    config = base()",
        "    # Batch sizes, optimizer, precision and memory are those of DeepSpeed.",
        *(
            f"    {_ONLY_FLOAT16 * is_offered(value)}config.{path} = {_literal(value)}"
            for path, value in found.settings.items()
        ),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


_ONLY_FLOAT16 = "# Add where compute_dtype is float16: "
"""Precedes settings of loss scales, the only settings offered by a conversion."""


def _literal(value: Any) -> str:
    """Formats a value as Python source."""
    return 'float("inf")' if value == math.inf else repr(value)


def table_rows(found: table.Conversion) -> list[tuple[str, ...]]:
    """Cells of a table: key, value, verdict and note, with a heading per section."""
    rows, last = list[tuple[str, ...]](), ""
    for row in found.rows:
        section, _, inside = row.key.partition(".")
        heading = f"{section}{', by default' * row.is_default}"
        if inside and heading != last:
            rows.append((heading, "", "", ""))
        last = heading
        name = f"  {inside}" if inside else heading
        rows.append((name, _short(row.value), row.verdict, row.note))
    return rows


def summary(found: table.Conversion) -> str:
    """Counts the keys of each verdict."""
    verdicts: Sequence[str] = [row.verdict for row in found.rows if not row.is_default]
    counts = {name: verdicts.count(name) for name in dict.fromkeys(verdicts)}
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _short(value: Any) -> str:
    """Formats a value in at most 12 characters."""
    text = repr(value)
    return text if len(text) <= 12 else f"{text[:9]}..."
