"""Checks whether rotary positions can be computed as they are set."""

import math
from collections.abc import Iterator

from zjax.config import schema
from zjax.errors import Problem


def rotation_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings of rotary positions that do not fit each other.

    Example:
        >>> scaling = schema.RopeScaling(kind="yarn", factor=4.0)
        >>> model = schema.Model(positions="rotary", rope_scaling=scaling)
        >>> print(*rotation_problems(schema.Config(model=model), 1))
        model.rope_scaling.original_length=0 is missing for kind='yarn'; give the \
longest sequence of the training before
    """
    model = config.model
    if model.positions != "rotary":
        return
    size, given, scaling = model.head_size, model.rotary_size, model.rope_scaling
    if given > size:
        problem = f"exceeds the {size} channels of a head"
        yield Problem("model.rotary_size", given, problem, f"use at most {size}, or 0")
    elif given % 2:
        problem = "is odd, and channels rotate in pairs"
        yield Problem("model.rotary_size", given, problem, "make it even")
    if scaling.kind not in ("none", "linear") and not scaling.original_length:
        problem = f"is missing for kind={scaling.kind!r}"
        remedy = "give the longest sequence of the training before"
        yield Problem("model.rope_scaling.original_length", 0, problem, remedy)
    if scaling.kind == "dynamic" and (given or size) == 2:
        problem = "needs more than the 2 channels of a head that rotate"
        yield Problem("model.rope_scaling.kind", "dynamic", problem, "use 'linear'")
    if scaling.kind == "yarn" and model.rope_theta <= 1:
        problem = "gives channels no wavelengths, which yarn compares"
        yield Problem("model.rope_theta", model.rope_theta, problem, "use more than 1")
    if scaling.kind == "longrope" and scaling.original_length == 1:
        problem = "gives no factor of queries and keys, which divides by its logarithm"
        yield Problem("model.rope_scaling.original_length", 1, problem, "use 2 or more")
    yield from _bounds(scaling)
    yield from _scales(scaling)
    if scaling.kind == "longrope":
        yield from _divisors(scaling, (given or size) // 2)


def _bounds(scaling: schema.RopeScaling) -> Iterator[Problem]:
    low, high = "low_frequency_factor", "high_frequency_factor"
    if scaling.kind == "yarn":
        low, high = "beta_slow", "beta_fast"
    least, most = getattr(scaling, low), getattr(scaling, high)
    if scaling.kind in ("yarn", "llama3") and least >= most:
        problem = f"is not above {low}={least}"
        yield Problem(f"model.rope_scaling.{high}", most, problem, "raise it")


def _scales(scaling: schema.RopeScaling) -> Iterator[Problem]:
    whole, given = scaling.mscale_all_dim, scaling.attention_factor
    if scaling.kind == "yarn" and scaling.mscale and (given or not whole):
        other = f"attention_factor={given}" if given else f"mscale_all_dim={whole}"
        problem, remedy = f"has no effect with {other}", "leave it at 0.0"
        yield Problem("model.rope_scaling.mscale", scaling.mscale, problem, remedy)


def _divisors(scaling: schema.RopeScaling, num_pairs: int) -> Iterator[Problem]:
    for name in ("short_factors", "long_factors"):
        given = getattr(scaling, name)
        if len(given) != num_pairs or not all(0 < x < math.inf for x in given):
            problem = f"is not {num_pairs} numbers above 0, one for each pair of "
            problem += "channels that rotate"
            yield Problem(f"model.rope_scaling.{name}", given, problem, "correct it")
