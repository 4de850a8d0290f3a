"""Checks whether latents of attention fit the other settings of a model."""

import dataclasses
from collections.abc import Iterator

from zjax.config import schema
from zjax.errors import Problem


def latent_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that do not fit `model.latent`, or have no effect there.

    Example:
        >>> model = schema.Model(latent=schema.Latent(value_size=8))
        >>> print(*latent_problems(schema.Config(model=model), 1))
        model.latent.value_size=8 has no effect with model.latent.key_rank=0; leave it \
at 0, or set model.latent.key_rank
    """
    model, latent = config.model, config.model.latent
    if latent.key_rank:
        yield from _sizes(model)
        yield from _unsupported(model)
        return
    for name in (field.name for field in dataclasses.fields(latent)):
        if value := getattr(latent, name):
            problem = "has no effect with model.latent.key_rank=0"
            remedy = "leave it at 0, or set model.latent.key_rank"
            yield Problem(f"model.latent.{name}", value, problem, remedy)


def _sizes(model: schema.Model) -> Iterator[Problem]:
    latent, turning = model.latent, model.rotary_size
    needed = {
        "model.latent.plain_size": (latent.plain_size, "that do not rotate"),
        "model.rotary_size": (turning, "that rotate"),
        "model.latent.value_size": (latent.value_size, "of values"),
    }
    missing = {name: what for name, (size, what) in needed.items() if not size}
    for name, what in missing.items():
        problem = f"is missing beside model.latent.key_rank={latent.key_rank}"
        yield Problem(name, 0, problem, f"give the channels of a head {what}")
    if missing:
        return
    size = latent.plain_size + turning
    if model.head_size != size:
        problem = f"is not the {size} of model.latent.plain_size and model.rotary_size"
        yield Problem("model.head_size", model.head_size, problem, "use 0")
    elif latent.value_size > size:
        problem = f"exceeds model.head_size={size}"
        remedy = f"use at most {size}"
        yield Problem("model.latent.value_size", latent.value_size, problem, remedy)


def _unsupported(model: schema.Model) -> Iterator[Problem]:
    beside = f"model.latent.key_rank={model.latent.key_rank}"
    if model.positions != "rotary":
        problem = f"rotates no channels, as {beside} needs"
        yield Problem("model.positions", model.positions, problem, "use 'rotary'")
    if model.num_kv_heads != model.num_heads:
        problem = f"is not model.num_heads={model.num_heads}, as {beside} needs"
        yield Problem("model.num_kv_heads", model.num_kv_heads, problem, "use 0")
    if model.has_input_bias:
        name = "use_bias" if model.attention_bias == "use_bias" else "attention_bias"
        value = getattr(model, name)
        problem = f"adds biases to queries, keys and values, which {beside} has not"
        remedy = "use model.attention_bias='none'"
        yield Problem(f"model.{name}", value, problem, remedy)
    for name in ("query_key_norm", "attention_sinks"):
        if getattr(model, name):
            problem = f"is not built for {beside}"
            yield Problem(f"model.{name}", True, problem, "use False")
