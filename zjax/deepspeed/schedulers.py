"""Converts learning-rate schedulers."""

from zjax.deepspeed.conversion import Conversion

PARAMS = "scheduler.params"
SHAPES = {
    "WarmupLR": "warmup_lr",
    "WarmupDecayLR": "warmup_decay_lr",
    "WarmupCosineLR": "warmup_cosine_lr",
    "OneCycle": "one_cycle",
    "LRRangeTest": "range_test",
}
"""Schedules by DeepSpeed's names."""
SECOND_DECAY = 0.99
"""Value of the second beta under DeepSpeed's OneCycle."""


def convert_scheduler(found: Conversion, rule: str) -> None:
    """Converts `scheduler`; `rule` is the optimizer's name in zjax, or empty."""
    kind = found.take_type("scheduler", "WarmupLR")
    if not kind:
        # Without a scheduler DeepSpeed keeps the optimizer's learning rate.
        if rule and not found.given("scheduler"):
            found.set(
                "scheduler",
                default=None,
                optimizer__schedule="constant",
                optimizer__schedule__num_warmup_steps=0,
            )
        return
    if kind not in SHAPES:
        found.refuse("scheduler.type", f"use one of {', '.join(SHAPES)}")
        found.skip_rest(PARAMS, "its scheduler is not supported")
        return
    if kind == "OneCycle":
        _convert_cycle(found, rule)
        return
    if kind == "LRRangeTest":
        _convert_range_test(found)
        return
    found.set("scheduler.type", optimizer__schedule=SHAPES[kind])
    _convert_warmup(found)
    _convert_ends(found, kind)


def sets_rate(found: Conversion) -> bool:
    """Whether the scheduler replaces the learning rate of the optimizer."""
    return found.get("scheduler.type", "") in ("OneCycle", "LRRangeTest")


def sets_momentum(found: Conversion, rule: str) -> bool:
    """Whether the scheduler replaces the betas of the optimizer."""
    cycles = found.get(f"{PARAMS}.cycle_momentum", True) is True
    is_cycle = found.get("scheduler.type", "") == "OneCycle"
    return is_cycle and cycles and rule in _WITH_BETAS


def _convert_warmup(found: Conversion) -> None:
    """Converts a warm-up from a learning rate of 0."""
    key = f"{PARAMS}.warmup_num_steps"
    number = found.take(key, 1_000)
    if number is not None and number < 1:
        found.refuse(key, "use 1 or more", "is no number of steps")
    found.copy(key, "optimizer__schedule__num_warmup_steps", 1_000)
    key = f"{PARAMS}.warmup_type"
    if found.take(key, "log") not in ("log", "linear", None):
        found.refuse(key, "use log, which DeepSpeed takes in its place, or linear")
    found.copy(key, "optimizer__schedule__warmup", "log")
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        remedy, why = "use 0: a warm-up starts there", "a warm-up starts at 0"
        found.refuse_if_on(f"{PARAMS}.{name}", remedy, why, default=0.0)


def _convert_ends(found: Conversion, kind: str) -> None:
    """Converts peak, number of steps and final learning rate."""
    key = f"{PARAMS}.warmup_max_lr"
    if peak := found.take(key, 1e-3 if kind == "WarmupDecayLR" else 0.0):
        found.set(key, default=peak, optimizer__peak_learning_rate=peak)
    key = f"{PARAMS}.total_num_steps"
    total = found.take(key, 0)
    if total:
        found.set(key, num_steps=total)
    elif total == 0 and kind != "WarmupLR":
        found.require(key, "is not given", f"give it: {kind} ends there")
    if kind == "WarmupCosineLR":
        key = f"{PARAMS}.cos_min_ratio"
        found.copy(key, "optimizer__schedule__final_fraction", 1e-4)


def _convert_cycle(found: Conversion, rule: str) -> None:
    """Converts OneCycle."""
    found.set("scheduler.type", optimizer__schedule="one_cycle")
    for name, setting in _BOUNDS.items():
        key = f"{PARAMS}.{name}"
        if not found.given(key):
            found.require(key, "is not given", "give it: OneCycle needs it")
        found.copy(key, setting, 0.0, tells_default=False)
    for name, (setting, default) in _CYCLE.items():
        key = f"{PARAMS}.{name}"
        found.copy(key, f"optimizer__schedule__{setting}", default, tells_default=False)
    _convert_decay(found)
    key = f"{PARAMS}.cycle_momentum"
    cycles = found.take(key, True)
    if sets_momentum(found, rule):
        note = f"b1 cycles, and b2 is {SECOND_DECAY}, in place of betas"
        settings = {"optimizer__schedule__momentum": "cycled_momentum"}
        found.set(key, note, default=True, **settings, optimizer__rule__b2=SECOND_DECAY)
        for name, (setting, default) in _MOMENTUM.items():
            found.copy(f"{PARAMS}.{name}", setting, default, tells_default=False)
    elif cycles and rule in ("sgd", "sgd_l2"):
        found.skip(key, "it has no betas, for which DeepSpeed leaves it, too")
    elif cycles:
        found.refuse(key, "use false", f"is not supported with {rule or 'no rule'}")
        if not found.given(key):
            found.require(key, "is on where it is not given", "write it as false")
    else:
        found.skip(key, "the betas stay")
    for name in _MOMENTUM:
        found.skip(f"{PARAMS}.{name}", "the betas stay")


def _convert_decay(found: Conversion) -> None:
    """Converts the decay after a cycle; `decay_step_size=0` means no decay."""
    key = f"{PARAMS}.decay_step_size"
    steps = found.take(key, 0)
    if steps:
        found.set(key, optimizer__schedule__num_decay_steps=steps)
        key = f"{PARAMS}.decay_lr_rate"
        found.copy(key, "optimizer__schedule__decay_rate", 0.0, tells_default=False)
        return
    for name in ("decay_step_size", "decay_lr_rate", "decay_mom_rate"):
        found.skip(f"{PARAMS}.{name}", "decay_step_size=0 is no decay")


def _convert_range_test(found: Conversion) -> None:
    """Converts LRRangeTest."""
    found.set("scheduler.type", optimizer__schedule="range_test")
    for name, (setting, default) in _RANGE_TEST.items():
        found.copy(f"{PARAMS}.lr_range_test_{name}", setting, default)


_WITH_BETAS = ("adamw", "adam", "lamb", "lion")
_BOUNDS = {
    "cycle_min_lr": "optimizer__schedule__min_learning_rate",
    "cycle_max_lr": "optimizer__peak_learning_rate",
}
_CYCLE = {
    "cycle_first_step_size": ("num_rise_steps", 2_000),
    "cycle_second_step_size": ("num_fall_steps", -1),
    "cycle_first_stair_count": ("num_rise_stairs", 0),
    "cycle_second_stair_count": ("num_fall_stairs", -1),
}
_MOMENTUM = {
    "cycle_min_mom": ("optimizer__schedule__momentum__min_momentum", 0.8),
    "cycle_max_mom": ("optimizer__schedule__momentum__max_momentum", 0.9),
    "decay_mom_rate": ("optimizer__schedule__momentum__momentum_decay_rate", 0.0),
}
_RANGE_TEST = {
    "min_lr": ("optimizer__schedule__start_learning_rate", 1e-3),
    "step_size": ("optimizer__schedule__num_steps", 2_000),
    "step_rate": ("optimizer__schedule__growth", 1.0),
    "staircase": ("optimizer__schedule__staircase", False),
}
CYCLE_KEYS = (
    *(*_BOUNDS, *_CYCLE, *_MOMENTUM, "cycle_momentum", "decay_step_size"),
    *("decay_lr_rate", *(f"lr_range_test_{name}" for name in _RANGE_TEST)),
)
"""Parameters of OneCycle and LRRangeTest."""
