"""Which layers see a window alone, and whether they can."""

from collections.abc import Iterator

from zjax.config import schema
from zjax.errors import Problem


def sliding_layers(model: schema.Model) -> tuple[bool, ...]:
    """Whether each layer sees the last `sliding_window` tokens alone.

    Example:
        >>> model = schema.Model(num_layers=3, sliding_window=8, full_attention_every=2)
        >>> sliding_layers(model)
        (True, False, True)
    """
    every = model.full_attention_every
    return tuple(
        model.sliding_window > 0 and not (every and number % every == 0)
        for number in range(1, model.num_layers + 1)
    )


def period_of_layers(model: schema.Model) -> int:
    """Layers after which the kinds of layers repeat: the layers of a block.

    Example:
        >>> period_of_layers(schema.Model(moe=schema.MoE(num_experts=8, every=2)))
        2
    """
    return max(model.moe.every, model.full_attention_every)


def window_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that sliding windows or soft caps do not go with.

    Example:
        >>> model = schema.Model(attention="sparse", sliding_window=8)
        >>> print(*window_problems(schema.Config(model=model), 1))
        model.sliding_window=8 is not a pattern of model.attention='sparse'; use 0, or \
sparsity.mode='local'
    """
    model = config.model
    yield from _without_effect(model)
    if model.sliding_window:
        yield from _window_problems(config)
    if model.attention_soft_cap and model.attention in ("cudnn", "sparse"):
        value = model.attention_soft_cap
        problem = f"bounds scores, which model.attention={model.attention!r} cannot"
        remedy = "use 0, or model.attention='xla'"
        yield Problem("model.attention_soft_cap", value, problem, remedy)
    if model.logit_soft_cap and (model.kind == "encoder" or config.distill.teacher):
        value = model.logit_soft_cap
        other = "model.kind='encoder'"
        other = "distill.teacher" if config.distill.teacher else other
        problem = f"bounds logits, which {other} does not"
        yield Problem("model.logit_soft_cap", value, problem, "use 0")
    if model.moe.num_experts and model.activation in ("geglu", "gelu_exact"):
        problem, remedy = "is no activation of experts", "use 'swiglu' or 'gelu'"
        yield Problem("model.activation", model.activation, problem, remedy)


def _window_problems(config: schema.Config) -> Iterator[Problem]:
    model, window = config.model, config.model.sliding_window
    form = config.random_ltd.form
    others = {
        "model.kind='encoder', which looks ahead": model.kind == "encoder",
        "sequence_warmup.form='window', another window": (
            config.sequence_warmup.form == "window"
        ),
        f"random_ltd.form={form!r}, which drops tokens of it": form != "none",
    }
    for other in (name for name, is_used in others.items() if is_used):
        problem = f"does not go with {other}"
        yield Problem("model.sliding_window", window, problem, "use 0")
    if model.attention == "sparse":
        problem = "is not a pattern of model.attention='sparse'"
        remedy = "use 0, or sparsity.mode='local'"
        yield Problem("model.sliding_window", window, problem, remedy)
    if model.full_attention_every > 1:
        yield from _blocks(model)
        yield from _loads(model)


def _blocks(model: schema.Model) -> Iterator[Problem]:
    """What goes by blocks of one layer, or makes blocks of its own."""
    every = model.full_attention_every
    usual = {"moe.every": 1, "moe.first_dense": 0, "mlp_tiles": 1}
    given = model.moe.every, model.moe.first_dense, model.mlp_tiles
    for (name, wanted), value in zip(usual.items(), given, strict=True):
        if value != wanted:
            problem = f"makes blocks of {every} layers, and model.{name}={value} "
            problem += "needs others"
            remedy = f"use 0, or model.{name}={wanted}"
            yield Problem("model.full_attention_every", every, problem, remedy)


def _loads(model: schema.Model) -> Iterator[Problem]:
    every, rate = model.full_attention_every, model.moe.bias_rate
    if rate:
        problem = "moves by the load of a block of one layer, and "
        problem += f"model.full_attention_every={every} makes blocks of {every}"
        yield Problem("model.moe.bias_rate", rate, problem, "use 0 for either")


def _without_effect(model: schema.Model) -> Iterator[Problem]:
    if model.full_attention_every == 1:
        problem = "lets no layer slide"
        yield Problem(
            "model.full_attention_every", 1, problem, "use 0 for both, or 2 or more"
        )
    for name in ("full_attention_every", "local_rope_theta"):
        value = getattr(model, name)
        if value and not model.sliding_window:
            problem = "has no effect with model.sliding_window=0"
            remedy = "leave it at 0, or set model.sliding_window"
            yield Problem(f"model.{name}", value, problem, remedy)
