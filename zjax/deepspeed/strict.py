"""Checks sections that DeepSpeed checks key by key, even sections that are off."""

import math
from typing import Any

from zjax.deepspeed.conversion import AUTO, Conversion
from zjax.deepspeed.zero import COUNTS, NO_EFFECT, STAGE_3, ZERO

_FILE = {"enabled": False, "output_path": "", "job_name": ""}
_BRAIN = {
    "enabled": False,
    "immediate_grad_update": False,
    "check_grad_overflow": True,
    "bf16_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
}
_OFFLOAD = {"device": "none", "nvme_path": None, "buffer_count": 5, "pin_memory": True}
_COMPILE_SWITCHES = (
    *("deepcompile", "free_activation", "offload_activation", "offload_opt_states"),
    *("offload_activation_pin_memory", "double_buffer", "symmetric_memory"),
    *("debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce"),
    *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
    "keep_all_input_tensors",
)
STRICT: dict[str, dict[str, Any]] = {
    "fp16": {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1_000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    },
    "bf16": _BRAIN,
    "bfloat16": _BRAIN,
    "tensorboard": _FILE,
    "csv_monitor": _FILE,
    "wandb": {"enabled": False, "group": None, "team": None, "project": ""},
    "comet": {
        "enabled": False,
        "samples_log_interval": 100,
        **dict.fromkeys(("project", "workspace", "api_key", "experiment_name")),
        **dict.fromkeys(("experiment_key", "online", "mode")),
    },
    "comms_logger": {
        "enabled": False,
        "prof_all": True,
        "prof_ops": [],
        "verbose": False,
        "debug": False,
    },
    "timers.throughput": {"enabled": True, "synchronized": True},
    "compile": {
        **dict.fromkeys(_COMPILE_SWITCHES, False),
        "free_activation_threshold": 10_485_760,
        "passes": None,
    },
    "tensor_parallel": {
        "autotp_size": 0,
        "tp_overlap_comm": False,
        "keep_module_on_host": False,
        "replace_with_kernel_inject": False,
        "kernel_inject": False,
        **dict.fromkeys(("dtype", "tensor_parallel", "tp", "injection_policy_tuple")),
        **dict.fromkeys(("partition_config", "preset_model")),
    },
    f"{ZERO}.offload_optimizer": _OFFLOAD
    | {
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    },
    f"{ZERO}.offload_param": _OFFLOAD
    | {"buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
}
"""Default of each key, whose type values must have; None for any value."""
_MODES = ("ignore", "warn", "fail")


def check_strict(found: Conversion) -> None:
    """Refuses keys and values that DeepSpeed refuses, in the sections of `STRICT`."""
    for section, defaults in STRICT.items():
        for key in found.inside(section):
            name = key[len(section) + 1 :].partition(".")[0]
            if name not in defaults:
                found.refuse_unknown(key, STRICT)
            elif defaults[name] is not None:
                found.get(key, defaults[name])
    for name in NO_EFFECT:
        found.get(f"{ZERO}.{name}", 0 if name in COUNTS else False)
    _check_ranges(found)
    _check_scale(found)
    key = "checkpoint.tag_validation"
    if str(found.get(key, "warn")).lower() not in _MODES:
        found.refuse(key, f"use one of {', '.join(_MODES)}", "is not a choice")


def _check_ranges(found: Conversion) -> None:
    """Refuses sizes and fractions of ZeRO that DeepSpeed refuses."""
    for name in COUNTS:
        if name != f"{STAGE_3}module_granularity_threshold":  # DeepSpeed takes any
            _check_range(found, f"{ZERO}.{name}", 0)
    for section in (f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"):
        for name, default in STRICT[section].items():
            if type(default) in (int, float):
                _check_range(found, f"{section}.{name}", default)


def _check_range(found: Conversion, key: str, default: int | float) -> None:
    """Refuses a negative number, and a fraction (float default) above 1."""
    most, remedy = (1, "0 to 1") if type(default) is float else (math.inf, "0 or more")
    number = found.get(key, default)
    if number != AUTO and not 0 <= number <= most:
        found.refuse(key, f"use {remedy}", "is out of range")


def _check_scale(found: Conversion) -> None:
    """Refuses loss scales that DeepSpeed refuses."""
    key = "fp16.loss_scale"
    scale = found.get(key, 0.0)
    if scale == AUTO:
        return
    if not 0 <= scale < math.inf:
        found.refuse(key, "use 0 for a dynamic scale, or more", "is out of range")
    if not scale and found.get("fp16.enabled", False) is True:
        for name, default in (("loss_scale_window", 1_000), ("min_loss_scale", 1)):
            key = f"fp16.{name}"
            number = found.get(key, default)
            if number != AUTO and number <= 0:
                found.refuse(key, "use 1 or more", "is out of range")
