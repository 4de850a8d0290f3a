"""Dtypes and loss scaling."""

from zjax.config.deepspeed.conversion import Conversion

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


def convert_precision(found: Conversion) -> None:
    """Reads `fp16`, `bf16`, `torch_autocast`, `data_types` and the dtype of sums."""
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
    keys = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")
    return any(found.get(key, False) == "auto" for key in keys)


def _convert_half(found: Conversion) -> bool:
    enabled = found.take("fp16.enabled", False)
    if not enabled:
        if enabled is False:
            found.skip("fp16.enabled", "it is off")
        for key in found.inside("fp16"):
            found.skip(key, "fp16 is off")
        return False
    found.set("fp16.enabled", precision__compute_dtype="float16")
    scale = found.take("fp16.loss_scale", 0.0)
    power = found.take("fp16.initial_scale_power", 16)
    prefix = "precision__loss_scale__"
    if scale:
        first = {f"{prefix}initial": scale, f"{prefix}window": 0}
        found.set("fp16.loss_scale", **first)
        for key in found.inside("fp16"):
            found.skip(key, "the loss scale is fixed")
        return True
    if scale is not None:
        found.skip("fp16.loss_scale", "the scale is dynamic")
    if power is not None:
        settings = {f"{prefix}initial": 2.0**power}
        found.set("fp16.initial_scale_power", default=power, **settings)
    names = {
        "loss_scale_window": ("window", 1_000),
        "hysteresis": ("hysteresis", 2),
        "consecutive_hysteresis": ("consecutive_hysteresis", False),
        "min_loss_scale": ("minimum", 1.0),
    }
    for name, (setting, default) in names.items():
        if (value := found.take(f"fp16.{name}", default)) is not None:
            settings = {f"{prefix}{setting}": value}
            found.set(f"fp16.{name}", **settings)
    found.skip("fp16.auto_cast", "inputs have the dtype of the computation")
    _refuse_if(found, "fp16.fp16_master_weights_and_grads", "use float32 masters")
    return True


def _convert_brain(found: Conversion) -> bool:
    section = "bfloat16" if found.given("bfloat16") else "bf16"
    enabled = found.take(f"{section}.enabled", False)
    if not enabled:
        if enabled is False:
            found.skip(f"{section}.enabled", "it is off")
        for key in found.inside(section):
            found.skip(key, f"{section} is off")
        return False
    found.set(f"{section}.enabled", precision__compute_dtype="bfloat16")
    found.skip(f"{section}.immediate_grad_update", "gradients are added in any case")
    check = found.take(f"{section}.check_grad_overflow", True)
    if check is not None:
        action = "skip" if check else "update"
        found.set(f"{section}.check_grad_overflow", precision__on_nonfinite=action)
    if found.take(f"{section}.bf16_master_weights_and_grads", False):
        key = f"{section}.bf16_master_weights_and_grads"
        found.set(key, precision__master_dtype="bfloat16")
    if found.take(f"{section}.bf16_optimizer_states", False):
        key = f"{section}.bf16_optimizer_states"
        found.set(key, optimizer__moment_dtype="bfloat16")
    for key in found.inside(section):
        found.skip(key, "float32 is kept")
    return True


def _convert_autocast(found: Conversion) -> bool:
    if not found.take("torch_autocast.enabled", False):
        for key in found.inside("torch_autocast"):
            found.skip(key, "torch_autocast is off")
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
    kinds = {"data_types.grad_accum_dtype": "grad_sum_dtype"}
    for key, setting in kinds.items():
        if not (name := found.take(key, "")):
            continue
        dtype = DTYPES.get(name, "")
        if dtype in ("float32", "bfloat16"):
            settings = {f"precision__{setting}": dtype}
            found.set(key, **settings)
        else:
            found.refuse(key, "use fp32 or bf16")
    for name in ("param_dtype", "buffer_dtype"):
        key = f"data_types.{name}"
        found.skip(key, "masters are float32, or as precision.master_dtype says")
    key = "communication_data_type"
    name = found.take(key, "")
    if name:
        exact = DTYPES.get(name) == "float32"
        found.set(key, precision__reduce_dtype="float32" if exact else "compute")
    found.skip("seq_parallel_communication_data_type", "sums are as reduce_dtype says")
    found.skip("prescale_gradients", "losses are means before they are added")
    found.skip("gradient_predivide_factor", "losses are means before they are added")


def _refuse_if(found: Conversion, key: str, remedy: str) -> None:
    if found.take(key, False):
        found.refuse(key, remedy)
    else:
        found.skip(key, "it is off")
