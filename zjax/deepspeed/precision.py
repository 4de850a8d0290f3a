"""Sections of dtypes and loss scaling."""

import math

from zjax.deepspeed.table import If, Meanings, No, Section, Values, derived, refusal
from zjax.settings.derived import offered

NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DTYPES = NAMES | {name: name for name in NAMES.values()}
DTYPES |= {f"torch.{name}": name for name in ("bfloat16", "float16")}
COMPUTE = "precision.compute_dtype"
SCALE = {
    "initial_scale_power": "initial",
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "minimum",
}
"""Settings of `precision.loss_scale` by keys of `fp16`."""
HALF = {
    "fp16_master_weights_and_grads": If(refusal("use float32 masters")),
    "consecutive_hysteresis": If(None),
}
BRAIN = {
    "check_grad_overflow": If(
        {"precision.on_nonfinite": "skip"}, {"precision.on_nonfinite": "update"}, True
    ),
    "bf16_master_weights_and_grads": If(
        {"precision.master_dtype": "bfloat16"}, "float32 is kept"
    ),
    "bf16_optimizer_states": If(
        {"optimizer.rule.moment_dtype": "bfloat16"}, "float32 is kept"
    ),
}
"""Keys that change runs of any dtype in zjax."""
MAX_POWER = 127
"""Largest exponent of a power of two in float32."""


def _half(values: Values) -> Meanings | str:
    """Meanings of `fp16`; float32 is the dtype if nothing is on or left to the run."""
    is_open, is_on = values.is_auto("enabled"), values["enabled"]
    scale, power = values["loss_scale"], values["initial_scale_power"]
    meanings: Meanings = {"enabled": {COMPUTE: "float16"}}
    if not 0 <= scale < math.inf:
        remedy = "use 0 for a dynamic scale, or more"
        meanings["loss_scale"] = refusal(remedy, "is out of range")
    if not is_on and not is_open:
        others = [f"{x}.enabled" for x in ("bf16", "bfloat16", "torch_autocast")]
        found = values.found
        is_half = any(found[other] or found.is_auto(other) for other in others)
        enabled = "it is off" if is_half else {COMPUTE: "float32"}
        return meanings | {"enabled": enabled, "*": "fp16 is off"}
    settings = {key: {name: values[key]} for key, name in SCALE.items()}
    settings["min_loss_scale"] = {"minimum": float(values["min_loss_scale"])}
    settings["initial_scale_power"] = {"initial": 2.0 ** min(power, MAX_POWER)}
    if scale:
        settings = {"loss_scale": {"initial": scale, "window": 0}}
    for key, numbers in settings.items():
        # A run that turns float16 on makes use of offered numbers.
        numbers = {f"precision.loss_scale.{n}": x for n, x in numbers.items()}
        offers = {n: x if x is False else offered(x) for n, x in numbers.items()}
        is_offer = is_open and not values.is_auto(key)
        offer = derived("for runs in float16", offers) if is_offer else numbers
        meanings.setdefault(key, offer)
    if scale:
        meanings |= dict.fromkeys(SCALE, "the loss scale is fixed")
    else:
        meanings["loss_scale"] = "the scale is dynamic"
        for key in ("loss_scale_window", "min_loss_scale"):
            if is_on and values[key] <= 0:
                meanings[key] = refusal("use 1 or more", "is out of range")
        if power > MAX_POWER:
            remedy, problem = f"use {MAX_POWER} or less", "is no power of a float32"
            meanings["initial_scale_power"] = refusal(remedy, problem)
    return meanings | (_unclear(values, HALF) if is_open else {})


def _brain(values: Values) -> Meanings | str:
    """Meanings of bfloat16."""
    if values.is_auto("enabled"):
        return (
            dict.fromkeys(BRAIN) | _unclear(values, BRAIN) | {"*": "it is the default"}
        )
    if values["enabled"] and values.found["fp16.enabled"]:
        values.found.need("bf16.enabled", "is on with fp16.enabled", "keep one of them")
    return {"enabled": {COMPUTE: "bfloat16"}} if values["enabled"] else "it is off"


def _unclear(values: Values, keys: dict[str, If]) -> Meanings:
    """Refusals of changed keys of a section that the run may or may not turn on."""
    remedy = f"write {values.path}.enabled as true or false"
    unclear = refusal(remedy, f"needs to know {values.path}.enabled")
    return {key: unclear for key, x in keys.items() if values[key] != x.default}


def _autocast(values: Values) -> Meanings | str:
    """Meanings of `torch_autocast`."""
    if not (dtype := DTYPES.get(str(values["dtype"]))):
        return {"dtype": refusal("use bfloat16 or float16")}
    return {"enabled": {COMPUTE: dtype}, "dtype": f"the dtype is {dtype}"}


def _sent(values: Values) -> Meanings | str:
    """Meanings of the dtypes of messages and of gradient sums."""
    meanings: Meanings = {}
    if total := values["data_types.grad_accum_dtype"]:
        sums = {"precision.grad_sum_dtype": DTYPES.get(total)}
        is_wide = DTYPES.get(total) in ("float32", "bfloat16")
        meanings["data_types.grad_accum_dtype"] = sums if is_wide else FEW
    if sent := values["communication_data_type"].lower():
        known = {"precision.reduce_dtype": "float32" if sent == "fp32" else "compute"}
        meanings["communication_data_type"] = known if sent in NAMES else UNKNOWN
    if values["seq_parallel_communication_data_type"].lower() not in NAMES:
        meanings["seq_parallel_communication_data_type"] = UNKNOWN
    return meanings


FEW = refusal("use fp32 or bf16")
UNKNOWN = refusal(f"use one of {', '.join(NAMES)}", "is not a choice")
SUMS, MEANS = (
    "sums are as reduce_dtype says",
    "losses are means before they are added",
)
SECTIONS = (
    Section(
        "fp16",
        {
            "enabled": False,
            "loss_scale": 0.0,
            "initial_scale_power": 16,
            "loss_scale_window": 1_000,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "auto_cast": No("inputs have the dtype of the computation", False),
            **HALF,
        },
        _half,
        is_strict=True,
    ),
    *(
        Section(
            name,
            {
                "": No("it is off"),
                "enabled": False,
                "immediate_grad_update": No("gradients are added in any case", False),
                **BRAIN,
            },
            _brain,
            is_strict=True,
            instead=[None],
        )
        for name in ("bf16", "bfloat16")
    ),
    Section(
        "torch_autocast",
        {
            "enabled": If("see dtype"),
            "dtype": "bfloat16",
            "lower_precision_safe_modules": No("norms and softmax are in float32"),
        },
        _autocast,
    ),
    Section(
        "",
        {
            "data_types.grad_accum_dtype": "",
            "communication_data_type": "",
            "seq_parallel_communication_data_type": No(SUMS, "fp32"),
            "prescale_gradients": No(MEANS),
            "gradient_predivide_factor": No(MEANS),
        },
        _sent,
    ),
)
