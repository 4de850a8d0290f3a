"""Checks rules of objectives that compare completions."""

from collections.abc import Iterator

from zjax.config.rl_rules import noise_problems, trains_values
from zjax.errors import Problem
from zjax.settings import choices, mixture, schema
from zjax.settings.preference import Dpo

_UNREAD = (
    "num_tokens",
    "sequence_warmup",
    "curriculum.metrics",
    "buckets",
    "random_ltd",
    "prune",
    "distill",
    "model.z_loss",
)
"""Settings of training on texts, which rows of examples do not follow."""


def preference_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings with which a run cannot learn from compared completions."""
    if config.preference is None:
        return
    kind = config.preference.kind
    for name in _UNREAD:
        value = choices.value_at(config, name)
        if value and value != choices.value_at(schema.Config(), name):
            problem = f"is not built for preference={kind!r}"
            yield Problem(name, value, problem, "leave it out")
    chosen = config.preference
    if isinstance(chosen, Dpo) and chosen.robust:
        if not chosen.label_smoothing:
            problem = "has no effect with preference.label_smoothing=0.0"
            remedy = "set the share of wrong preferences there, or leave it out"
            yield Problem("preference.robust", True, problem, remedy)
    if chosen.reads_reference:
        problem = "makes log-ratios noise: the reference has none"
        yield from noise_problems(config, problem)
    if chosen.has_rewards and config.lora and not trains_values(config.lora):
        patterns = config.lora.also_train
        problem = "leaves the rewards of preference='reward_model' at 0"
        yield Problem("lora.also_train", patterns, problem, "add 'head/value'")
    model, data = config.model, config.data
    if model.kind != "decoder":
        problem = f"has no log-probabilities of texts, which preference={kind!r} reads"
        yield Problem("model.kind", model.kind, problem, "use 'decoder'")
    if mixture.sees_future(model):
        moe = choices.value_at(model, "moe")
        problem = "sees later tokens, which a completion must not"
        yield Problem("model.moe", moe, problem, "use 'token_choice'")
    if data.source != "tokens":
        problem = f"has no completions to compare, which preference={kind!r} reads"
        remedy = "use 'tokens', and data.path of zjax data prepare --examples=pairs"
        yield Problem("data.source", data.source, problem, remedy)
    elif data.packing != "documents":
        problem = f"joins completions, which preference={kind!r} reads apart"
        yield Problem("data.packing", data.packing, problem, "use 'documents'")
