"""Sections of the optimizer, and of the scheduler that sets the learning rate."""

from zjax.deepspeed.table import If, Meanings, No, Section, To, Values, derived, refusal

SGD = ("sgd", "sgd_l2")
ONE_BIT = ("onebit_adam", "zero_one_adam", "onebit_lamb")
RULES = {name.replace("_", ""): name for name in ("adamw", "lamb", "lion", *ONE_BIT)}
RULES |= {"adam": "adamw", "sgd": "sgd"}
"""Optimizers by DeepSpeed's names in lower case."""
MUON = refusal(
    "leave the section out and set optimizer.rule=muon with a rate of its own, or "
    "give optax.contrib.muon to zjax.initialize, whose steps have the size of "
    "DeepSpeed's but are computed in float32, not in half precision",
    "has steps of another size: optimizer.rule=muon takes steps that are "
    "0.2 * sqrt(inputs of the matrix) times as large",
)
GIVE = refusal("give an optax optimizer to zjax.initialize in its place")
CORRECTED = ("adamw", "adam", "lamb")
"""Optimizers with a setting for bias correction of moments."""
RATIOS = {"max_coeff": 10.0, "min_coeff": 0.01}
"""Limits of `lamb`'s trust ratios, equal in DeepSpeed and zjax."""
KEPT_RATIOS = (*RATIOS, "coeff_beta", "factor_max", "factor_min", "factor_threshold")
TORCH_DECAY = 0.01
"""Default weight decay of torch.optim.AdamW, which `torch_adam` uses."""
RULE, PARAMS = "optimizer.rule.", "optimizer.params."
XLA, BITS = No("XLA compiles the update"), No("XLA sends the bits")
NO_EFFECT = {
    "fused": XLA,
    "foreach": XLA,
    "set_grad_none": No("gradients are values"),
    "cuda_aware": BITS,
    "comm_backend_name": BITS,
    "max_grad_norm": No(refusal("write it as gradient_clipping")),
    "": No("it is empty"),
}


def rule_of(values: Values) -> str:
    """Name of the optimizer in zjax; empty without an optimizer that zjax has."""
    found = values.found
    kind = found["optimizer.type"].lower()
    # Weight decay passes through momentum, as in torch.optim.SGD.
    factors = [f"{PARAMS}weight_decay", f"{PARAMS}momentum"]
    if kind == "sgd" and all(found.is_auto(x) or found[x] for x in factors):
        return "sgd_l2"
    # DeepSpeed's Adam is AdamW by default.
    is_coupled = kind == "adam" and not found[f"{PARAMS}adam_w_mode"]
    return "adam" if is_coupled else RULES.get(kind, "")


def _default_decay(values: Values) -> float:
    """Weight decay of an optimizer that names none: `torch_adam` has torch's."""
    found, is_torch = values.found, values.found[f"{PARAMS}torch_adam"]
    is_adam = found["optimizer.type"].lower() in ("adam", "adamw")
    return 0.01 if is_torch and is_adam and rule_of(values) == "adamw" else 0.0


def _lacks_type(values: Values, example: str) -> Meanings | str:
    """Meanings of a section with parameters but without a type."""
    remedy, why = f"name one, as {example}", "its type is not given"
    if values.is_auto("type"):
        return {"type": refusal(remedy, "is filled by no run"), "*": why}
    if values.found.inside(values.path) and not values.given("type"):
        values.found.need(f"{values.path}.type", "is not given", remedy)
    return why


def _optimizer(values: Values) -> Meanings | str:
    """Meaning of the type of the optimizer."""
    if not (kind := values["type"]):
        return _lacks_type(values, "AdamW")
    name = rule_of(values)
    # Replicas that exchange bits take the place of data shards.
    bits = {"mesh.replica": -1, "mesh.data": 1} if name in ONE_BIT else {}
    rule = {"optimizer.rule": name} | bits
    return {"type": rule if name else MUON if kind.lower() == "muon" else GIVE}


def _params(values: Values) -> Meanings | str:
    """Meanings of the parameters of the optimizer."""
    if not (name := rule_of(values)):
        return "its optimizer is not supported"
    kind = values.found["optimizer.type"]
    meanings: Meanings = {
        "adam_w_mode": f"the rule is {name}",
        "lr": {"optimizer.peak_learning_rate": values["lr"]},
        "*": refusal("leave it out", f"is not a parameter of {kind}"),
    }
    # DeepSpeed decays vectors as well.
    decay, everywhere = values["weight_decay"], {"optimizer.decay_vectors": True}
    meanings["weight_decay"] = {"optimizer.weight_decay": decay}
    if values.is_auto("weight_decay"):
        why = "as the run has it, also of vectors"
        meanings["weight_decay"] = derived(why, everywhere)
    elif decay:
        meanings["weight_decay"] = {"optimizer.weight_decay": decay} | everywhere
    if schedule_of(values) in ("OneCycle", "LRRangeTest"):
        meanings["lr"] = derived("the scheduler sets it")
    betas = values["betas"]
    if name in SGD:
        pass
    elif _cycles_momentum(values):
        meanings["betas"] = derived("the scheduler sets them")
    elif len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas):
        b1, b2 = map(float, betas)
        meanings["betas"] = {f"{RULE}b1": b1, f"{RULE}b2": b2}
    else:
        remedy = "write two numbers, as [0.9, 0.999]"
        meanings["betas"] = refusal(remedy, "are not two numbers")
    if values["torch_adam"] and name == "adamw":
        meanings["bias_correction"] = None
    if name in ONE_BIT:
        why = "1-bit optimizers of DeepSpeed never correct moments"
        meanings["bias_correction"] = derived(why, {f"{RULE}bias_correction": False})
    if name == "onebit_lamb":
        kept = derived("mean norms of the warm-up are kept in its place")
        meanings |= dict.fromkeys(KEPT_RATIOS, kept)
    if name == "lamb":
        problem = "is another limit of the ratios of norms than here"
        for key, limit in RATIOS.items():
            fixed = derived("ratios of norms are from 0.01 to 10")
            other = refusal(f"use {limit}", problem)
            meanings[key] = fixed if values[key] == limit else other
    return meanings


KINDS = {
    "WarmupLR": "warmup_lr",
    "WarmupDecayLR": "warmup_decay_lr",
    "WarmupCosineLR": "warmup_cosine_lr",
    "OneCycle": "one_cycle",
    "LRRangeTest": "range_test",
}
"""Schedules by DeepSpeed's names."""
WARMUPS, ONE_CYCLE, RANGE_TEST = [*KINDS][:3], ["OneCycle"], ["LRRangeTest"]
SCHEDULE, CYCLES = "optimizer.schedule.", "scheduler.params.cycle_momentum"
SECOND_DECAY = 0.99
"""Value of the second beta under DeepSpeed's OneCycle."""
MOMENTUM = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")


def schedule_of(values: Values) -> str:
    """Type of the scheduler; empty without a scheduler that zjax has."""
    kind = values.found["scheduler.type"]
    return kind if kind in KINDS else ""


def _cycles_momentum(values: Values) -> bool:
    """Whether the scheduler replaces the betas of the optimizer."""
    cycles = schedule_of(values) == "OneCycle" and values.found[CYCLES]
    return cycles and rule_of(values) in (*CORRECTED, "lion")


def _scheduler(values: Values) -> Meanings | str:
    """Meaning of the type of the scheduler."""
    if not values.given("") and rule_of(values):
        # Without a scheduler DeepSpeed keeps the optimizer's learning rate.
        constant = {"optimizer.schedule": "constant", f"{SCHEDULE}num_warmup_steps": 0}
        return {"": constant}
    if not (kind := values["type"]):
        return _lacks_type(values, "WarmupLR")
    known = {"optimizer.schedule": KINDS.get(kind)}
    return {
        "type": known if kind in KINDS else refusal(f"use one of {', '.join(KINDS)}")
    }


def _schedule(values: Values) -> Meanings | str:
    """Meanings of the parameters of the scheduler."""
    if not (kind := schedule_of(values)):
        return "its scheduler is not supported"
    later = refusal("use -1: a run that resumes continues its schedule")
    is_new = values["last_batch_iteration"] == -1
    meanings: Meanings = {"last_batch_iteration": "a run begins" if is_new else later}
    if kind == "OneCycle":
        return meanings | _cycle(values)
    return meanings | (_warmup(values, kind) if kind in WARMUPS else {})


def _warmup(values: Values, kind: str) -> Meanings:
    """Meanings of the parameters of a warm-up from a learning rate of 0."""
    peak, meanings = values["warmup_max_lr"], Meanings()
    if values["warmup_num_steps"] < 1:
        few = refusal("use 1 or more", "is no number of steps")
        meanings["warmup_num_steps"] = few
    if values["warmup_type"] not in ("log", "linear"):
        remedy = "use log, which DeepSpeed takes in its place, or linear"
        meanings["warmup_type"] = refusal(remedy)
    if kind == "WarmupDecayLR" or values.given("warmup_max_lr"):
        meanings["warmup_max_lr"] = {"optimizer.peak_learning_rate": peak}
    is_missing = not values["total_num_steps"] and not values.is_auto("total_num_steps")
    if is_missing and kind != "WarmupLR":
        missing = refusal(f"give it: {kind} ends there", "is not given")
        meanings["total_num_steps"] = missing
    return meanings


def _cycle(values: Values) -> Meanings:
    """Meanings of the parameters of OneCycle."""
    meanings: Meanings = {}
    for name in ("cycle_min_lr", "cycle_max_lr"):
        if not values.given(name):
            meanings[name] = refusal("give it: OneCycle needs it", "is not given")
    rule, cycles = rule_of(values), values["cycle_momentum"]
    if _cycles_momentum(values):
        note = f"b1 cycles, and b2 is {SECOND_DECAY}, in place of betas"
        settings = {f"{SCHEDULE}momentum": "cycled_momentum", f"{RULE}b2": SECOND_DECAY}
        meanings["cycle_momentum"] = derived(note, settings)
    else:
        meanings |= dict.fromkeys(("cycle_momentum", *MOMENTUM), "the betas stay")
        if cycles and rule in SGD:
            why = "it has no betas, for which DeepSpeed leaves it, too"
            meanings["cycle_momentum"] = why
        elif cycles and values.given("cycle_momentum"):
            problem = f"is not supported with {rule or 'no rule'}"
            meanings["cycle_momentum"] = refusal("use false", problem)
        elif cycles:
            problem = "is on where it is not given"
            meanings["cycle_momentum"] = refusal("write it as false", problem)
    if not values["decay_step_size"]:
        names = ("decay_step_size", "decay_lr_rate", "decay_mom_rate")
        meanings |= dict.fromkeys(names, "decay_step_size=0 is no decay")
    return meanings


LATE = refusal("use 0: a warm-up starts there"), "a warm-up starts at 0"
SECTIONS = (
    Section(
        "optimizer",
        {"type": "", "legacy_fusion": XLA},
        _optimizer,
    ),
    Section(
        "optimizer.params",
        {
            "adam_w_mode": True,
            "lr": 1e-3,
            "weight_decay": _default_decay,
            "betas": [0.9, 0.999],
            "eps": To(1e-8, f"{RULE}eps", (*CORRECTED, *ONE_BIT)),
            "momentum": To(0.0, f"{RULE}b1", SGD),
            "bias_correction": To(True, f"{RULE}bias_correction", CORRECTED),
            "torch_adam": No("XLA compiles the update", False),
            "amsgrad": If(refusal("leave it out")),
            "freeze_step": To(100_000, f"{RULE}freeze_step", ONE_BIT[::2]),
            "var_freeze_step": To(100_000, f"{RULE}freeze_step", ONE_BIT[1:2]),
            "var_update_scaler": To(16, f"{RULE}var_update_scaler", ONE_BIT[1:2]),
            # DeepSpeed's default, not a misspelt power of two.
            "local_step_scaler": To(32_678, f"{RULE}local_step_scaler", ONE_BIT[1:2]),
            "local_step_clipper": To(16, f"{RULE}local_step_clipper", ONE_BIT[1:2]),
            **RATIOS,
            **NO_EFFECT,
        },
        _params,
        kind=rule_of,
        instead=[None],
    ),
    Section("scheduler", {"type": "", "": None}, _scheduler),
    Section(
        "scheduler.params",
        {
            "warmup_num_steps": To(1_000, f"{SCHEDULE}num_warmup_steps", WARMUPS),
            "warmup_type": To("log", f"{SCHEDULE}warmup", WARMUPS),
            "warmup_min_lr": If(*LATE, 0.0, WARMUPS),
            "warmup_min_ratio": If(*LATE, 0.0, WARMUPS),
            "warmup_max_lr": 1e-3,
            "total_num_steps": To(0, "num_steps", WARMUPS, 1),
            "cos_min_ratio": To(1e-4, f"{SCHEDULE}final_fraction", WARMUPS[2:]),
            "cycle_min_lr": To(0.0, f"{SCHEDULE}min_learning_rate", ONE_CYCLE),
            "cycle_max_lr": To(0.0, "optimizer.peak_learning_rate", ONE_CYCLE),
            "cycle_first_step_size": To(2_000, f"{SCHEDULE}num_rise_steps", ONE_CYCLE),
            "cycle_second_step_size": To(-1, f"{SCHEDULE}num_fall_steps", ONE_CYCLE),
            "cycle_first_stair_count": To(0, f"{SCHEDULE}num_rise_stairs", ONE_CYCLE),
            "cycle_second_stair_count": To(-1, f"{SCHEDULE}num_fall_stairs", ONE_CYCLE),
            "decay_step_size": To(0, f"{SCHEDULE}num_decay_steps", ONE_CYCLE),
            "decay_lr_rate": To(0.0, f"{SCHEDULE}decay_rate", ONE_CYCLE),
            "cycle_momentum": True,
            "cycle_min_mom": To(0.8, f"{SCHEDULE}momentum.min_momentum", ONE_CYCLE),
            "cycle_max_mom": To(0.9, f"{SCHEDULE}momentum.max_momentum", ONE_CYCLE),
            "decay_mom_rate": To(
                0.0, f"{SCHEDULE}momentum.momentum_decay_rate", ONE_CYCLE
            ),
            "lr_range_test_min_lr": To(
                1e-3, f"{SCHEDULE}start_learning_rate", RANGE_TEST
            ),
            "lr_range_test_step_size": To(2_000, f"{SCHEDULE}num_steps", RANGE_TEST),
            "lr_range_test_step_rate": To(1.0, f"{SCHEDULE}growth", RANGE_TEST),
            "lr_range_test_staircase": To(False, f"{SCHEDULE}staircase", RANGE_TEST),
            "last_batch_iteration": -1,
        },
        _schedule,
        kind=schedule_of,
    ),
)
