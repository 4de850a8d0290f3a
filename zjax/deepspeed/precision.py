"""Converts dtypes and loss scaling."""

from collections.abc import Callable
from typing import Any

from zjax.deepspeed.conversion import Conversion
from zjax.settings import derived

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
}
SENT = ("fp32", "fp16", "bf16")
"""Dtypes of messages."""
SCALE = {
    "loss_scale_window": ("window", 1_000),
    "hysteresis": ("hysteresis", 2),
    "consecutive_hysteresis": ("consecutive_hysteresis", False),
    "min_loss_scale": ("minimum", 1.0),
}
"""Settings of `precision.loss_scale` and defaults, by keys of `fp16`."""
MAX_POWER = 127
"""Largest exponent of a power of two in float32."""
HALF = {"fp16_master_weights_and_grads": False, "consecutive_hysteresis": False}
"""Keys of `fp16` that change runs of any dtype in zjax, and defaults."""
BRAIN = {
    "check_grad_overflow": True,
    "bf16_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
}
"""Keys of `bf16` that change runs of any dtype in zjax, and defaults."""


def convert_precision(found: Conversion) -> None:
    """Converts `fp16`, `bf16`, `torch_autocast`, `data_types` and the dtype of sums."""
    half = _convert_half(found)
    brain = _convert_brain(found)
    cast = _convert_autocast(found)
    chosen = {key: on for key, on in (("fp16", half), ("bf16", brain)) if on}
    if len(chosen) > 1:
        found.require("bf16.enabled", "is on with fp16.enabled", "keep one of them")
    elif not chosen and not cast and not _from_run(found):
        found.set("fp16.enabled", default=False, precision__compute_dtype="float32")
    _convert_sums(found)


def _from_run(found: Conversion) -> bool:
    """Whether the run decides about half precision ("auto")."""
    keys = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")
    return any(found.get(key, False) == "auto" for key in keys)


def _convert_half(found: Conversion) -> bool:
    """Converts `fp16`; returns whether it is on."""
    enabled = found.take("fp16.enabled", False)
    if enabled is None:
        _refuse_changes(found, "fp16", HALF)
        _convert_scale(found, derived.offered, "for runs in float16")
        return False
    if not enabled:
        found.skip("fp16.enabled", "it is off")
        found.skip_rest("fp16", "fp16 is off")
        return False
    found.set("fp16.enabled", precision__compute_dtype="float16")
    found.refuse_if_on("fp16.fp16_master_weights_and_grads", "use float32 masters")
    _convert_scale(found, lambda value: value, "")
    return True


def _convert_scale(found: Conversion, mark: Callable[[Any], Any], note: str) -> None:
    """Converts the loss scale; `mark` may turn numbers into offers.

    With `fp16.enabled=auto` the numbers apply only if the run chooses float16.
    """
    scale = found.take("fp16.loss_scale", 0.0)
    power = found.take("fp16.initial_scale_power", 16)
    prefix = "precision__loss_scale__"
    if scale:
        first = {f"{prefix}initial": mark(scale), f"{prefix}window": mark(0)}
        found.set("fp16.loss_scale", note, **first)
        found.skip_rest("fp16", "the loss scale is fixed")
        return
    if scale is not None:
        found.skip("fp16.loss_scale", "the scale is dynamic")
    if power is not None and power <= MAX_POWER:
        settings = {f"{prefix}initial": mark(2.0**power)}
        found.set("fp16.initial_scale_power", note, default=power, **settings)
    elif power is not None:
        remedy = f"use {MAX_POWER} or less"
        found.refuse("fp16.initial_scale_power", remedy, "is no power of a float32")
    for name, (setting, default) in SCALE.items():
        if (value := found.take(f"fp16.{name}", default)) is not None:
            value = value if isinstance(value, bool) else mark(value)
            found.set(f"fp16.{name}", note, **{f"{prefix}{setting}": value})
    found.skip("fp16.auto_cast", "inputs have the dtype of the computation")


def _convert_brain(found: Conversion) -> bool:
    """Converts `bf16` or `bfloat16`; returns whether it is on."""
    section = "bfloat16" if found.given("bfloat16") else "bf16"
    enabled = found.take(f"{section}.enabled", False)
    why = "gradients are added in any case"
    if enabled is None:
        found.skip(f"{section}.immediate_grad_update", why)
        _refuse_changes(found, section, BRAIN)
        return False
    if not enabled:
        found.skip("bf16", "it is off")
        found.skip(f"{section}.enabled", "it is off")
        found.skip_rest(section, f"{section} is off")
        return False
    found.set(f"{section}.enabled", precision__compute_dtype="bfloat16")
    found.skip(f"{section}.immediate_grad_update", why)
    check = found.take(f"{section}.check_grad_overflow", True)
    if check is not None:
        action = "skip" if check else "update"
        found.set(f"{section}.check_grad_overflow", precision__on_nonfinite=action)
    if found.take(f"{section}.bf16_master_weights_and_grads", False):
        key = f"{section}.bf16_master_weights_and_grads"
        found.set(key, precision__master_dtype="bfloat16")
    if found.take(f"{section}.bf16_optimizer_states", False):
        key = f"{section}.bf16_optimizer_states"
        found.set(key, optimizer__rule__moment_dtype="bfloat16")
    found.skip_rest(section, "float32 is kept")
    return True


def _refuse_changes(found: Conversion, section: str, defaults: dict[str, Any]) -> None:
    """Refuses changed keys of a section that the run may or may not turn on."""
    for name, default in defaults.items():
        key = f"{section}.{name}"
        if found.take(key, default) in (default, None):
            found.skip(key, "it is the default")
        else:
            remedy = f"write {section}.enabled as true or false"
            found.refuse(key, remedy, f"needs to know {section}.enabled")


def _convert_autocast(found: Conversion) -> bool:
    """Converts `torch_autocast`; returns whether it is on."""
    if not found.take("torch_autocast.enabled", False):
        found.skip_rest("torch_autocast", "torch_autocast is off")
        return False
    name = str(found.take("torch_autocast.dtype", "bfloat16"))
    dtype = DTYPES.get(name, "")
    if not dtype:
        found.refuse("torch_autocast.dtype", "use bfloat16 or float16")
        return True
    found.set("torch_autocast.enabled", precision__compute_dtype=dtype)
    found.skip("torch_autocast.dtype", f"the dtype is {dtype}")
    key = "torch_autocast.lower_precision_safe_modules"
    found.skip(key, "normalisation and softmax are in float32 in any case")
    return True


def _convert_sums(found: Conversion) -> None:
    """Converts dtypes of gradient sums and of messages."""
    key = "data_types.grad_accum_dtype"
    if name := found.take(key, ""):
        dtype = DTYPES.get(name, "")
        if dtype in ("float32", "bfloat16"):
            found.set(key, precision__grad_sum_dtype=dtype)
        else:
            found.refuse(key, "use fp32 or bf16")
    key = "communication_data_type"
    name = found.take(key, "")
    if name and name.lower() in SENT:
        exact = name.lower() == "fp32"
        found.set(key, precision__reduce_dtype="float32" if exact else "compute")
    elif name:
        found.refuse(key, f"use one of {', '.join(SENT)}", "is not a choice")
    key = "seq_parallel_communication_data_type"
    if found.get(key, "fp32").lower() not in SENT:
        found.refuse(key, f"use one of {', '.join(SENT)}", "is not a choice")
    found.skip(key, "sums are as reduce_dtype says")
    found.skip("prescale_gradients", "losses are means before they are added")
    found.skip("gradient_predivide_factor", "losses are means before they are added")
