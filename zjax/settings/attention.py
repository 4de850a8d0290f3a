"""Checks attention settings: latents, rotary positions, windows and sparse layouts."""

import math
from collections.abc import Iterator

from zjax.errors import Problem
from zjax.settings import axes, choices, schema


def latent_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that contradict `model.latent`.

    Example:
        >>> latent = schema.Latent(plain_size=8, value_size=13)
        >>> model = schema.Model(
        ...     positions=schema.Rotary(size=4), use_bias=False, latent=latent
        ... )
        >>> print(*latent_problems(schema.Config(model=model), 1))
        model.latent.value_size=13 exceeds model.head_size=12; use at most 12
    """
    if latent := config.model.latent:
        yield from _sizes(config.model, latent)
        yield from _unsupported(config.model)


def _sizes(model: schema.Model, latent: schema.Latent) -> Iterator[Problem]:
    """Yields missing or contradictory head sizes of latent attention."""
    size = latent.plain_size + model.rotary.size
    if not model.rotary.size:
        problem = "is missing beside model.latent"
        remedy = "give the channels of a head that rotate"
        yield Problem("model.positions.size", 0, problem, remedy)
    elif model.head_size != size:
        problem = (
            f"is not the {size} of model.latent.plain_size and model.positions.size"
        )
        yield Problem("model.head_size", model.head_size, problem, "use 0")
    elif latent.value_size > size:
        problem = f"exceeds model.head_size={size}"
        remedy = f"use at most {size}"
        yield Problem("model.latent.value_size", latent.value_size, problem, remedy)


def _unsupported(model: schema.Model) -> Iterator[Problem]:
    """Yields settings that latent attention does not support."""
    beside = "model.latent"
    if not isinstance(model.positions, schema.Rotary):
        problem = f"rotates no channels, as {beside} needs"
        yield Problem("model.positions", "learned", problem, "use 'rotary'")
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
    if every := model.rotary.unrotated_every:
        problem = f"is not built for {beside}"
        yield Problem("model.positions.unrotated_every", every, problem, "use 0")


def rotation_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields rotary settings that contradict each other.

    Example:
        >>> scaling = schema.Yarn(factor=4.0)
        >>> model = schema.Model(positions=schema.Rotary(scaling=scaling))
        >>> print(*rotation_problems(schema.Config(model=model), 1))
        model.positions.scaling.original_length=0 is missing for kind='yarn'; give the \
longest sequence of the training before
    """
    model, positions = config.model, config.model.positions
    if not isinstance(positions, schema.Rotary):
        return
    size, given, scaling = model.head_size, positions.size, positions.scaling
    if every := positions.unrotated_every:
        yield from _blocks(model, "positions.unrotated_every", every)
        if every > (number := model.num_layers):
            problem = f"leaves none of model.num_layers={number} without rotation"
            remedy = f"use 0, or at most {number}"
            yield Problem("model.positions.unrotated_every", every, problem, remedy)
    if given > size:
        problem = f"exceeds the {size} channels of a head"
        yield Problem(
            "model.positions.size", given, problem, f"use at most {size}, or 0"
        )
    elif given % 2:
        problem = "is odd, and channels rotate in pairs"
        yield Problem("model.positions.size", given, problem, "make it even")
    if isinstance(scaling, schema.ExtendedRope) and not scaling.original_length:
        problem = f"is missing for kind={scaling.kind!r}"
        remedy = "give the longest sequence of the training before"
        yield Problem("model.positions.scaling.original_length", 0, problem, remedy)
    match scaling:
        case schema.DynamicRope() if (given or size) == 2:
            problem = "needs more than the 2 channels of a head that rotate"
            yield Problem("model.positions.scaling", "dynamic", problem, "use 'linear'")
        case schema.Yarn():
            yield from _yarn(scaling, positions.theta)
        case schema.Llama3():
            yield from _bounds(scaling, "low_frequency_factor", "high_frequency_factor")
        case schema.Longrope():
            yield from _divisors(scaling, (given or size) // 2)


def _yarn(scaling: schema.Yarn, theta: float) -> Iterator[Problem]:
    """Yields a base, bounds and scales of YaRN that contradict each other."""
    if theta <= 1:
        problem = "gives channels no wavelengths, which yarn compares"
        yield Problem("model.positions.theta", theta, problem, "use more than 1")
    yield from _bounds(scaling, "beta_slow", "beta_fast")
    whole, given = scaling.mscale_all_dim, scaling.attention_factor
    if scaling.mscale and (given or not whole):
        other = f"attention_factor={given}" if given else f"mscale_all_dim={whole}"
        problem, remedy = f"has no effect with {other}", "leave it at 0.0"
        yield Problem("model.positions.scaling.mscale", scaling.mscale, problem, remedy)


def _bounds(scaling: schema.RopeScaling, low: str, high: str) -> Iterator[Problem]:
    """Yields bounds of frequencies that are not in order."""
    least, most = getattr(scaling, low), getattr(scaling, high)
    if least >= most:
        problem = f"is not above {low}={least}"
        yield Problem(f"model.positions.scaling.{high}", most, problem, "raise it")


def _divisors(scaling: schema.Longrope, num_pairs: int) -> Iterator[Problem]:
    """Yields LongRoPE factors that are not one positive number per rotated pair."""
    if scaling.original_length == 1:
        problem = "gives no factor of queries and keys, which divides by its logarithm"
        yield Problem(
            "model.positions.scaling.original_length", 1, problem, "use 2 or more"
        )
    for name in ("short_factors", "long_factors"):
        given = getattr(scaling, name)
        if len(given) != num_pairs or not all(0 < x < math.inf for x in given):
            problem = f"is not {num_pairs} numbers above 0, one for each pair of "
            problem += "channels that rotate"
            yield Problem(
                f"model.positions.scaling.{name}", given, problem, "correct it"
            )


def sliding_layers(model: schema.Model) -> tuple[bool, ...]:
    """Whether each layer uses the sliding window.

    Example:
        >>> window = schema.SlidingWindow(full_attention_every=2)
        >>> sliding_layers(schema.Model(num_layers=3, window=window))
        (True, False, True)
    """
    if model.window is None:
        return model.num_layers * (False,)
    every, numbers = model.window.full_attention_every, range(1, model.num_layers + 1)
    return tuple(not (every and number % every == 0) for number in numbers)


def window_of_layers(model: schema.Model) -> int:
    """Returns the window that all layers have; 0 if a layer sees all earlier tokens.

    Example:
        >>> window = schema.SlidingWindow(size=8)
        >>> window_of_layers(schema.Model(window=window))
        8
    """
    return model.window_size if all(sliding_layers(model)) else 0


def rotated_layers(model: schema.Model) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys, if positions are rotary."""
    every, numbers = model.rotary.unrotated_every, range(1, model.num_layers + 1)
    return tuple(not (every and number % every == 0) for number in numbers)


def periods_of_layers(model: schema.Model) -> dict[str, int]:
    """Periods after which kinds of layers repeat, by setting; 0 for none."""
    return {
        "moe.every": model.moe.every if model.moe else 0,
        "window.full_attention_every": (
            model.window.full_attention_every if model.window else 0
        ),
        "positions.unrotated_every": model.rotary.unrotated_every,
    }


def period_of_layers(model: schema.Model) -> int:
    """Number of layers per block: the period after which kinds of layers repeat.

    Example:
        >>> period_of_layers(schema.Model(moe=schema.TokenChoice(every=2)))
        2
    """
    return max(1, *periods_of_layers(model).values())


def window_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that contradict sliding windows or soft caps.

    Example:
        >>> window = schema.SlidingWindow(size=8)
        >>> model = schema.Model(attention=schema.Sparse(), window=window)
        >>> print(*window_problems(schema.Config(model=model), 1))
        model.window.size=8 is not a pattern of model.attention='sparse'; use \
model.window=None, or attention.pattern='local'
    """
    model = config.model
    if model.window:
        yield from _window_problems(config, model.window)
    kernel = model.attention.kind
    if model.attention_soft_cap and kernel in ("cudnn", "sparse"):
        value = model.attention_soft_cap
        problem = f"bounds scores, which model.attention={kernel!r} cannot"
        remedy = "use 0, or model.attention='xla'"
        yield Problem("model.attention_soft_cap", value, problem, remedy)
    if model.logit_soft_cap and (model.kind == "encoder" or config.distill):
        value = model.logit_soft_cap
        other = "distill.teacher" if config.distill else "model.kind='encoder'"
        problem = f"bounds logits, which {other} does not"
        yield Problem("model.logit_soft_cap", value, problem, "use 0")
    if model.value_head and model.kind == "encoder":
        problem = "is of a decoder, and model.kind='encoder'"
        yield Problem("model.value_head", True, problem, "use False")
    if model.moe and model.activation in ("geglu", "gelu_exact"):
        problem, remedy = "is no activation of experts", "use 'swiglu' or 'gelu'"
        yield Problem("model.activation", model.activation, problem, remedy)


_NO_WINDOW = "use model.window=None"


def _window_problems(
    config: schema.Config, window: schema.SlidingWindow
) -> Iterator[Problem]:
    """Yields settings that contradict a sliding window."""
    model, every = config.model, window.full_attention_every
    dropping = choices.value_at(config, "random_ltd")
    others = {
        "model.kind='encoder', which looks ahead": model.kind == "encoder",
        "sequence_warmup='window', another window": (
            isinstance(config.sequence_warmup, schema.Window)
        ),
        f"random_ltd={dropping!r}, which drops tokens of it": bool(dropping),
    }
    for other in (name for name, is_used in others.items() if is_used):
        problem = f"does not go with {other}"
        yield Problem("model.window.size", window.size, problem, _NO_WINDOW)
    if isinstance(model.attention, schema.Sparse):
        problem = "is not a pattern of model.attention='sparse'"
        remedy = f"{_NO_WINDOW}, or attention.pattern='local'"
        yield Problem("model.window.size", window.size, problem, remedy)
    if window.rope_theta and not isinstance(model.positions, schema.Rotary):
        problem = "has no effect with model.positions='learned'"
        remedy = "leave it at 0, or set model.positions to 'rotary'"
        yield Problem("model.window.rope_theta", window.rope_theta, problem, remedy)
    if every:
        yield from _blocks(model, "window.full_attention_every", every)


_NO_PERIOD = {
    "window.full_attention_every": ("lets no layer slide", _NO_WINDOW),
    "positions.unrotated_every": ("lets no layer rotate", "use 0"),
}
"""What a period of 1 does, and the remedy."""


def _blocks(model: schema.Model, setting: str, every: int) -> Iterator[Problem]:
    """Yields settings that need other blocks than the period of a setting makes."""
    field = f"model.{setting}"
    if every == 1:
        problem, remedy = _NO_PERIOD[setting]
        yield Problem(field, 1, problem, f"{remedy}, or 2 or more")
        return
    usual = {"moe.every": 1, "moe.first_dense": 0, "mlp_tiles": 1}
    # Another period of the same length makes equal blocks.
    others = dict.fromkeys({*_NO_PERIOD} - {setting}, 0)
    for name, wanted in (usual | others).items():
        value = choices.value_at(model, name)
        if value not in (None, wanted, every if name in others else None):
            problem = f"makes blocks of {every} layers, and model.{name}={value} "
            problem += "needs others"
            remedy = f"use 0, or model.{name}={wanted}"
            yield Problem(field, every, problem, remedy)
    if rate := model.bias_rate:
        problem = "moves by the load of a block of one layer, and "
        problem += f"{field}={every} makes blocks of {every}"
        yield Problem("model.moe.bias_rate", rate, problem, "use 0 for either")


_COUNTS = ("num_global_blocks", "num_random_blocks", "num_sliding_window_blocks")
"""Settings that count blocks of one row, which must exist at `model.max_length`."""


def sparsity_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields sparse patterns that make no block layout of `data.length`."""
    if not isinstance(given := config.model.attention, schema.Sparse):
        return
    yield from _length(config.data.length, given.block)
    pattern = given.pattern
    if isinstance(pattern, schema.Fixed):
        yield from _fixed(pattern)
    is_horizontal = choices.value_at(pattern, "horizontal_global_attention")
    if is_horizontal and config.model.kind == "decoder":
        problem = "lets tokens see later ones, which model.kind='decoder' rules out"
        yield _problem("horizontal_global_attention", True, problem, "use False")
    if isinstance(pattern, schema.Variable):
        yield from _windows(pattern)
    if isinstance(pattern, schema.GlobalRanges):
        yield from _ranges(pattern)
    yield from _counts(pattern, given.block, config.model.max_length)


def _length(length: int, block: int) -> Iterator[Problem]:
    """Yields a sequence length that is not a multiple of the block."""
    if length % block:
        below, above = length // block * block, -(-length // block) * block
        remedy = f"use {below} or {above}" if below else f"use {above}"
        problem = f"is not a multiple of model.attention.block={block}"
        yield Problem("data.length", length, problem, remedy)


def _fixed(given: schema.Fixed) -> Iterator[Problem]:
    """Yields contradictions of the `fixed` pattern."""
    width, count = given.num_local_blocks, given.num_global_blocks
    if count == 0 or width % count:
        problem = f"does not divide model.attention.pattern.num_local_blocks={width}"
        yield _problem(
            "num_global_blocks", count, problem, axes.suggest_divisors(width)
        )
        return
    number, places = given.num_different_global_patterns, width // count
    name = "num_different_global_patterns"
    if number > places:
        problem = f"is more than the {places} places in a window of {width} blocks"
        yield _problem(name, number, problem, f"use at most {places}")
    if number > 1 and not given.different_layout_per_head:
        problem = "needs heads that differ"
        remedy = "use 1, or set model.attention.pattern.different_layout_per_head=True"
        yield _problem(name, number, problem, remedy)


def _windows(given: schema.Variable) -> Iterator[Problem]:
    """Yields local windows of less than one block."""
    sizes = given.local_window_blocks
    if not sizes or min(sizes) < 1:
        problem = "is not a list of windows of 1 block or more"
        yield _problem("local_window_blocks", sizes, problem, "use one like (4,)")


def _ranges(given: schema.GlobalRanges) -> Iterator[Problem]:
    """Yields ranges of global blocks that are negative or do not end."""
    starts, ends = given.global_block_indices, given.global_block_end_indices
    if any(start < 0 for start in starts):
        problem, remedy = "counts blocks from 0", "use one like (0,)"
        yield _problem("global_block_indices", starts, problem, remedy)
    if not ends:
        return
    pairs = zip(starts, ends, strict=False)
    if len(starts) != len(ends) or any(start >= end for start, end in pairs):
        name = "model.attention.pattern.global_block_indices"
        problem = f"does not end each of {name}={starts}"
        remedy = "give one end after each start, or () for single blocks"
        yield _problem("global_block_end_indices", ends, problem, remedy)


def _counts(pattern: choices.Choice, block: int, max_length: int) -> Iterator[Problem]:
    """Yields numbers of blocks above the blocks of a row."""
    num_blocks = -(-max_length // block)
    for name in _COUNTS:
        count = choices.value_at(pattern, name)
        if count is not None and count > num_blocks:
            problem = f"is more than the {num_blocks} blocks of model.max_length="
            problem += f"{max_length}"
            yield _problem(name, count, problem, f"use at most {num_blocks}")


def _problem(name: str, value: object, problem: str, remedy: str) -> Problem:
    return Problem(f"model.attention.pattern.{name}", value, problem, remedy)
