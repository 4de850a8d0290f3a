"""Converts the optimizer and learning rate."""

from typing import Any

from zjax.deepspeed import schedulers
from zjax.deepspeed.conversion import AUTO, Conversion

PARAMS = "optimizer.params"
RULES = {
    "adam": "adamw",
    "adamw": "adamw",
    "lamb": "lamb",
    "lion": "lion",
    "sgd": "sgd",
    "onebitadam": "onebit_adam",
    "zerooneadam": "zero_one_adam",
    "onebitlamb": "onebit_lamb",
}
"""Optimizers by DeepSpeed's names in lower case."""
GIVE = "give an optax optimizer to zjax.initialize in its place"
OTHERS = {
    "muon": (
        "leave the section out and set optimizer.rule=muon with a rate of its own, or "
        "give optax.contrib.muon to zjax.initialize, whose steps have the size of "
        "DeepSpeed's but are computed in float32, not in half precision",
        "has steps of another size: optimizer.rule=muon takes steps that are "
        "0.2 * sqrt(inputs of the matrix) times as large",
    )
}
"""Remedy and problem of unsupported optimizers, by DeepSpeed's names in lower case."""
CORRECTED = ("adamw", "adam", "lamb")
"""Optimizers with a setting for bias correction of moments."""
ONE_BIT = ("onebit_adam", "zero_one_adam", "onebit_lamb")
NO_EFFECT = {
    "torch_adam": "XLA compiles the update",
    "fused": "XLA compiles the update",
    "foreach": "XLA compiles the update",
    "set_grad_none": "gradients are values",
    "cuda_aware": "XLA sends the bits",
    "comm_backend_name": "XLA sends the bits",
}
RATIOS = {"max_coeff": 10.0, "min_coeff": 0.01}
"""Limits of `lamb`'s trust ratios, equal in DeepSpeed and zjax."""
KEPT_RATIOS = (*RATIOS, "coeff_beta", "factor_max", "factor_min", "factor_threshold")
TORCH_DECAY = 0.01
"""Default weight decay of torch.optim.AdamW, which `torch_adam` uses."""
UNTIL = {
    "onebit_adam": ("freeze_step", 100_000),
    "onebit_lamb": ("freeze_step", 100_000),
    "zero_one_adam": ("var_freeze_step", 100_000),
}


def convert_optimizer(found: Conversion) -> None:
    """Converts `optimizer` and `scheduler`."""
    name = _convert_rule(found)
    schedulers.convert_scheduler(found, name)


def _convert_rule(found: Conversion) -> str:
    """Converts type and parameters of the optimizer; returns the name in zjax."""
    found.skip("optimizer.legacy_fusion", "XLA compiles the update")
    kind = found.take_type("optimizer", "AdamW")
    if not kind:
        return ""
    name = RULES.get(kind.lower(), "")
    if not name:
        remedy, problem = OTHERS.get(kind.lower(), (GIVE, "is not supported"))
        found.refuse("optimizer.type", remedy, problem)
        found.skip_rest(PARAMS, "its optimizer is not supported")
        return ""
    decoupled = found.take(f"{PARAMS}.adam_w_mode", True)
    # DeepSpeed's Adam is AdamW by default.
    if kind.lower() == "adam" and not decoupled:
        name = "adam"
    if name == "sgd" and _decays_with_momentum(found):
        name = "sgd_l2"
    found.skip(f"{PARAMS}.adam_w_mode", f"the rule is {name}")
    found.set("optimizer.type", optimizer__rule=name)
    _convert_numbers(found, name)
    for key, why in NO_EFFECT.items():
        found.skip(_param(key), why)
    found.refuse_if_on(_param("amsgrad"), "leave it out")
    _convert_bias_correction(found, name)
    if found.given(_param("max_grad_norm")):
        found.refuse(_param("max_grad_norm"), "write it as gradient_clipping")
    if name in ONE_BIT:
        _convert_one_bit(found, name)
    _convert_ratios(found, name)
    found.skip(PARAMS, "it is empty")
    for key in found.inside(PARAMS):
        found.refuse(key, "leave it out", f"is not a parameter of {kind}")
    return name


def _convert_bias_correction(found: Conversion, name: str) -> None:
    """Converts a key of Adam and LAMB, which 1-bit optimizers accept and do not use."""
    key = _param("bias_correction")
    if name in ONE_BIT:
        found.take(key, True)
        why = "1-bit optimizers of DeepSpeed never correct moments"
        found.set(key, why, default=False, optimizer__rule__bias_correction=False)
    elif name in CORRECTED and not found.get(_param("torch_adam"), False):
        found.copy(key, "optimizer__rule__bias_correction", True, tells_default=False)


def _decays_with_momentum(found: Conversion) -> bool:
    """Whether weight decay passes through momentum, as in torch.optim.SGD."""
    return all(found.get(_param(name), 0.0) for name in ("weight_decay", "momentum"))


def _convert_numbers(found: Conversion, name: str) -> None:
    """Converts learning rate, weight decay, betas and eps."""
    if schedulers.sets_rate(found):
        found.derive(_param("lr"), "the scheduler sets it")
    else:
        found.copy(_param("lr"), "optimizer__peak_learning_rate", 1e-3)
    is_torch = name == "adamw" and found.take(_param("torch_adam"), False)
    _convert_decay(found, TORCH_DECAY if is_torch else 0.0)
    if name in ("sgd", "sgd_l2"):
        found.copy(_param("momentum"), "optimizer__rule__b1", 0.0)
        return
    betas = found.take(_param("betas"), [0.9, 0.999], list)
    if schedulers.sets_momentum(found, name):
        found.derive(_param("betas"), "the scheduler sets them")
    elif betas is not None:
        _convert_betas(found, betas)
    if name != "lion":
        found.copy(_param("eps"), "optimizer__rule__eps", 1e-8)


def _convert_decay(found: Conversion, default: float) -> None:
    """Converts weight decay, which DeepSpeed applies to vectors as well."""
    key, everywhere = _param("weight_decay"), {"optimizer__decay_vectors": True}
    decay = found.get(key, default)
    if decay == AUTO:
        found.set(key, "as the run has it, also of vectors", **everywhere)
        return
    everywhere = everywhere if decay else {}
    found.set(key, default=decay, optimizer__weight_decay=decay, **everywhere)


def _convert_betas(found: Conversion, betas: list[Any]) -> None:
    """Converts a pair of betas."""
    key = _param("betas")
    if len(betas) != 2 or not all(isinstance(b, int | float) for b in betas):
        found.refuse(key, "write two numbers, as [0.9, 0.999]", "are not two numbers")
        return
    b1, b2 = map(float, betas)
    found.set(key, default=betas, optimizer__rule__b1=b1, optimizer__rule__b2=b2)


def _convert_ratios(found: Conversion, name: str) -> None:
    """Checks the limits of LAMB's trust ratios, which zjax fixes."""
    if name == "onebit_lamb":
        for key in KEPT_RATIOS:
            found.derive(_param(key), "mean norms of the warm-up are kept in its place")
    if name == "lamb":
        for key, limit in RATIOS.items():
            if found.take(_param(key), limit) not in (limit, None):
                problem = "is another limit of the ratios of norms than here"
                found.refuse(_param(key), f"use {limit}", problem)
            found.derive(_param(key), "ratios of norms are from 0.01 to 10")


def _convert_one_bit(found: Conversion, name: str) -> None:
    """Converts 1-bit optimizers: replicas take the place of data shards."""
    found.settings |= {"mesh.replica": -1, "mesh.data": 1}
    key, default = UNTIL[name]
    found.copy(_param(key), "optimizer__rule__freeze_step", default)
    if name != "zero_one_adam":
        return
    # 32_678 is DeepSpeed's default, not a misspelt power of two.
    scalers = {"var_update_scaler": 16, "local_step_scaler": 32_678}
    for key, default in (scalers | {"local_step_clipper": 16}).items():
        found.copy(_param(key), f"optimizer__rule__{key}", default)


def _param(name: str) -> str:
    return f"{PARAMS}.{name}"
