"""Checks rules of reinforcement learning."""

import re
from collections.abc import Iterator

from zjax.errors import Problem
from zjax.schedule.pacing import is_function_name
from zjax.settings import choices, mixture, ranges, rl, schema

_UNREAD = (
    "num_epochs",
    "num_tokens",
    "sequence_warmup",
    "curriculum.metrics",
    "buckets",
    "random_ltd",
    "layer_drop",
    "prune",
    "distill",
    "preference",
    "elasticity",
    "model.z_loss",
    "evaluation.early_stopping",
)
"""Settings of training on `data`, which a rollout does not follow."""
_LARGEST_WEIGHT = 1e6
"""Largest weight of a reward, whose squares then fit in float32."""


def rl_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings with which a run cannot learn from its own texts."""
    if config.rl is None:
        return
    yield from _unread(config)
    yield from _model(config)
    yield from _rollout(config, config.rl)
    yield from _objective(config, config.rl)
    yield from _rewards(config.rl)
    if isinstance(config.rl.critic, rl.Own):
        yield from _own_critic(config, config.rl)
    if config.rl.correction:
        yield from _correction(config.rl.correction, config.rl.objective)


def _unread(config: schema.Config) -> Iterator[Problem]:
    """Yields settings of training on data that are set beside `rl`."""
    for name in _UNREAD:
        value = choices.value_at(config, name)
        if value and value != choices.value_at(schema.Config(), name):
            problem = "has no effect on texts that the run draws itself (rl)"
            yield Problem(name, value, problem, "leave it out")


def _model(config: schema.Config) -> Iterator[Problem]:
    """Yields models that do not draw texts as they score them."""
    model = config.model
    if model.kind != "decoder":
        problem = "draws no texts, which rl learns from"
        yield Problem("model.kind", model.kind, problem, "use 'decoder'")
    if mixture.sees_future(model):
        kind = choices.value_at(model, "moe")
        problem = "sees later tokens, which a sampler has not drawn yet"
        yield Problem("model.moe", kind, problem, "use 'token_choice'")
    problem = "makes the policy of the loss another than the policy of the rollout (rl)"
    yield from noise_problems(config, problem)
    if local := config.communication.local_steps:
        name = "communication.local_steps"
        problem = "lets replicas learn apart from the policy that draws texts (rl)"
        yield Problem(
            f"{name}.num_steps", local.num_steps, problem, f"leave out {name}"
        )


def noise_problems(config: schema.Config, problem: str) -> Iterator[Problem]:
    """Yields dropout and noise of routers; `problem` says what noise does to a run."""
    names = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
    rates = {f"model.{name}": getattr(config.model, name) for name in names}
    rates |= {"lora.dropout": config.lora.dropout} if config.lora else {}
    for field, rate in rates.items():
        if rate > 0:
            yield Problem(field, rate, problem, "use 0.0")
    for field, value in mixture.noise_of_routing(config.model).items():
        remedy = "use 0.0" if isinstance(value, float) else "use 'none'"
        yield Problem(field, value, problem, remedy)


def trains_values(lora: schema.Lora) -> bool:
    """Whether the vector of values is trained beside adapters."""
    try:
        return any(re.search(pattern, "head/value") for pattern in lora.also_train)
    except re.error:  # another rule tells it
        return True


def _rollout(config: schema.Config, given: rl.Rl) -> Iterator[Problem]:
    """Yields sizes of rollouts that leave no prompt room, or no batch."""
    most, length = given.rollout.max_new_tokens, config.data.length
    if most >= length:
        problem = f"leaves a prompt no token of data.length={length}"
        remedy = f"use at most {length - 1}"
        yield Problem("rl.rollout.max_new_tokens", most, problem, remedy)
    size, total = config.global_batch_size, given.num_texts
    if size and total % size:
        problem = f"does not divide the {total} texts of a rollout"
        remedy = "use a divisor, or 0 for one step on each rollout"
        yield Problem("global_batch_size", size, problem, remedy)
    if isinstance(given.overlong, rl.Penalise) and given.overlong.margin > most:
        problem = f"is above rl.rollout.max_new_tokens={most}"
        remedy = f"use at most {most}"
        yield Problem("rl.overlong.margin", given.overlong.margin, problem, remedy)
    refills, drawn = given.rollout.max_refills, given.num_texts
    if refills and drawn * (1 + refills) > ranges.MAX_ROWS:
        problem = f"draws up to {drawn * (1 + refills):,} texts for a step, more than "
        problem, remedy = problem + f"{ranges.MAX_ROWS:,}", "use less"
        yield Problem("rl.rollout.max_refills", refills, problem, remedy)
    if given.reference and config.lora and config.lora.init_from:
        problem = "starts beside the reference (rl.reference), which is the model "
        problem += "without adapters"
        remedy = "merge the adapters (zjax export) and use checkpoint.init_from"
        yield Problem("lora.init_from", config.lora.init_from, problem, remedy)
    if given.reference and config.lora:
        yield from base_problems(config.lora)
    if given.reference and not config.checkpoint.init_from:
        problem = "diverges from weights that know nothing: the run starts from random "
        remedy = "set checkpoint.init_from, or leave it out"
        kind = given.reference.kind
        yield Problem("rl.reference", kind, problem + "ones", remedy)
    if given.evaluation_prompts and not config.evaluation.num_batches:
        problem = "has no effect with evaluation.num_batches=0"
        remedy = "set evaluation.num_batches, or leave it out"
        value = given.evaluation_prompts
        yield Problem("rl.evaluation_prompts", value, problem, remedy)
    if given.rollout.max_refills and not isinstance(given.objective, rl.Grouped):
        problem = f"drops groups, and rl.objective={given.objective.kind!r} has none"
        refills = given.rollout.max_refills
        yield Problem("rl.rollout.max_refills", refills, problem, "leave it at 0")


def base_problems(lora: schema.Lora) -> Iterator[Problem]:
    """Yields settings of LoRA by which weights other than adapters change."""
    problem = "changes the policy where no adapter is left out"
    if lora.form != "lora":
        remedy = "use lora, or no reference"
        yield Problem("lora.form", lora.form, problem, remedy)
    # Values of a critic are no part of the policy.
    if {*lora.also_train} - {"head/value"}:
        remedy = "leave it out, or use no reference"
        yield Problem("lora.also_train", lora.also_train, problem, remedy)


def _objective(config: schema.Config, given: rl.Rl) -> Iterator[Problem]:
    """Yields settings of the objective that cannot act."""
    objective, rollout = given.objective, given.rollout
    if isinstance(objective, rl.Grouped) and rollout.num_samples == 1:
        problem = f"leaves rl.objective={objective.kind!r} no texts to compare"
        yield Problem("rl.rollout.num_samples", 1, problem, "use 2 or more")
    default = type(objective)()
    is_single = given.num_updates(config.global_batch_size or given.num_texts) == 1
    for name in objective.ratio_settings if is_single else ():
        value, usual = getattr(objective, name), getattr(default, name)
        if value != usual:
            problem = "has no effect with one step on each rollout, whose ratios are 1"
            remedy = f"leave it at {usual!r}, or set rl.num_epochs or global_batch_size"
            yield Problem(f"rl.objective.{name}", value, problem, remedy)
    if isinstance(objective, rl.Clipped) and 0 < (most := objective.max_ratio) <= 1:
        problem, remedy = "bounds ratios below 1, where they start", "use 3.0, or 0.0"
        yield Problem("rl.objective.max_ratio", most, problem, remedy)
    weights = [reward.weight for reward in given.rewards]
    if getattr(objective, "normalise_each", False) and len(weights) == 1:
        problem, remedy = "has no effect on one reward", "leave it at False"
        yield Problem("rl.objective.normalise_each", True, problem, remedy)
    if isinstance(objective, rl.Grouped) and objective.normalise_each:
        if (baseline := objective.chosen_baseline) != "group_std":
            problem = f"divides by standard deviations, and the baseline is {baseline}"
            remedy = "leave it at False, or set rl.objective.baseline='group_std'"
            yield Problem("rl.objective.normalise_each", True, problem, remedy)
    if given.has_values and config.lora and not trains_values(config.lora):
        given_patterns = config.lora.also_train
        problem = "leaves the values of rl.objective='ppo' at 0"
        yield Problem("lora.also_train", given_patterns, problem, "add 'head/value'")
    if isinstance(objective, rl.Grouped) and isinstance(given.reference, rl.InReward):
        problem = "gives each token a reward, and "
        problem += f"rl.objective={objective.kind!r} reads one of each text"
        remedy = "use 'loss', or rl.objective='reinforce_pp' or 'ppo'"
        yield Problem("rl.reference", "reward", problem, remedy)


def _own_critic(config: schema.Config, given: rl.Rl) -> Iterator[Problem]:
    """Yields settings beside a separate critic that cannot act."""
    objective = given.objective
    if not isinstance(objective, rl.Ppo):
        problem = f"learns values, which rl.objective={objective.kind!r} does not read"
        remedy = "leave it out, or set rl.objective='ppo'"
        yield Problem("rl.critic", "own", problem, remedy)
    elif objective.value_weight != (usual := rl.Ppo().value_weight):
        problem = "weighs values beside the policy, and rl.critic='own' learns them "
        problem, value = problem + "alone", objective.value_weight
        remedy = f"leave it at {usual}, or set rl.critic.peak_learning_rate"
        yield Problem("rl.objective.value_weight", value, problem, remedy)
    has_start = isinstance(given.critic, rl.Own) and given.critic.init_from
    if config.lora and config.lora.init_from and not has_start:
        problem = "starts the policy, and rl.critic='own' starts without adapters"
        remedy = "set rl.critic.init_from, or merge the adapters (zjax export) and use "
        remedy += "checkpoint.init_from"
        yield Problem("lora.init_from", config.lora.init_from, problem, remedy)
    codec = choices.value_at(config, "communication.codec")
    if codec != choices.value_at(schema.Config(), "communication.codec"):
        problem = "changes what replicas send, and rl.critic='own' has no such "
        problem, remedy = problem + "messages", "leave it out, or use 'shared'"
        yield Problem("communication.codec", codec, problem, remedy)


def _rewards(given: rl.Rl) -> Iterator[Problem]:
    """Yields rewards that have no name, no weight, or the name of another."""
    names = [reward.name for reward in given.rewards]
    for index, reward in enumerate(given.rewards):
        path = f"rl.rewards[{index}]"
        if isinstance(reward, rl.RunReward):
            if not reward.directory:
                problem, remedy = "names no run", "give the directory of a reward model"
                yield Problem(f"{path}.directory", "", problem, remedy)
        elif not is_function_name(reward.function):
            problem = "is not module:function"
            remedy = "name a function, such as 'zjax.rl.tasks.sums:reward'"
            yield Problem(f"{path}.function", reward.function, problem, remedy)
        if not abs(reward.weight) <= _LARGEST_WEIGHT:
            remedy = f"use -{_LARGEST_WEIGHT:g} to {_LARGEST_WEIGHT:g}"
            yield Problem(f"{path}.weight", reward.weight, "is out of range", remedy)
        if reward.weight == 0:
            problem, remedy = "leaves the reward no effect", "use another, or remove it"
            yield Problem(f"{path}.weight", reward.weight, problem, remedy)
        if reward.name and reward.name in names[:index]:
            problem, remedy = "is named twice", "name it once, with one weight"
            yield Problem(f"{path}.{reward.named_by}", reward.name, problem, remedy)


def _correction(
    correction: rl.Correction, objective: rl.Objective
) -> Iterator[Problem]:
    """Yields corrections of another unit than the ratios, and empty ranges."""
    field, unit = "rl.correction", correction.unit
    if isinstance(objective, rl.Gspo | rl.Cispo) and unit != objective.ratio:
        problem = f"weighs another unit than rl.objective={objective.kind!r}"
        yield Problem(f"{field}.unit", unit, problem, f"use {objective.ratio!r}")
    if (
        isinstance(correction, rl.Drop)
        and correction.min_weight > correction.max_weight
    ):
        least, most = correction.min_weight, correction.max_weight
        problem, remedy = f"is above max_weight={most}", "use less"
        yield Problem(f"{field}.min_weight", least, problem, remedy)
