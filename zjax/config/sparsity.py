"""Checks whether the settings of sparse attention make a layout.

The same as what `zjax_kernels` refuses, in terms of the settings; a test keeps both
equal.
"""

from collections.abc import Iterator

from zjax.config import axes, schema
from zjax.errors import Problem

MODES: dict[str, tuple[str, ...]] = {
    "different_layout_per_head": ("fixed", "variable", "bigbird"),
    "num_local_blocks": ("fixed",),
    "num_global_blocks": ("fixed", "bigbird"),
    "horizontal_global_attention": ("fixed", "variable"),
    "num_different_global_patterns": ("fixed",),
    "num_random_blocks": ("variable", "bigbird"),
    "num_sliding_window_blocks": ("bigbird", "bslongformer", "local"),
    "local_window_blocks": ("variable",),
    "global_block_indices": ("variable", "bslongformer"),
    "global_block_end_indices": ("variable", "bslongformer"),
    "seed": ("variable", "bigbird"),
}
"""Modes that read a setting; all modes read the other settings."""
_COUNTS = ("num_global_blocks", "num_random_blocks", "num_sliding_window_blocks")
"""Settings that count blocks of one row."""


def sparsity_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings that make no layout of the length of the model.

    Example:
        >>> model = schema.Model(attention="sparse")
        >>> data = schema.Data(length=1000)
        >>> print(*sparsity_problems(schema.Config(model=model, data=data), 1))
        data.length=1000 is not a multiple of model.sparsity.block=64; use 960 or 1024
    """
    if config.model.attention != "sparse":
        return
    yield from _length(config)
    given = config.model.sparsity
    if given.mode == "fixed":
        yield from _fixed(given)
    if given.horizontal_global_attention and config.model.kind == "decoder":
        problem = "lets tokens see later ones, which model.kind='decoder' rules out"
        yield _problem("horizontal_global_attention", True, problem, "use False")
    if given.mode == "variable":
        yield from _windows(given)
    if given.mode in MODES["global_block_indices"]:
        yield from _ranges(given)
    yield from _counts(config.model)


def _length(config: schema.Config) -> Iterator[Problem]:
    length, block = config.data.length, config.model.sparsity.block
    if length % block:
        below, above = length // block * block, -(-length // block) * block
        remedy = f"use {below} or {above}" if below else f"use {above}"
        problem = f"is not a multiple of model.sparsity.block={block}"
        yield Problem("data.length", length, problem, remedy)


def _fixed(given: schema.Sparsity) -> Iterator[Problem]:
    width, count = given.num_local_blocks, given.num_global_blocks
    if count == 0 or width % count:
        problem = f"does not divide model.sparsity.num_local_blocks={width}"
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
        remedy = "use 1, or set model.sparsity.different_layout_per_head=True"
        yield _problem(name, number, problem, remedy)


def _windows(given: schema.Sparsity) -> Iterator[Problem]:
    sizes = given.local_window_blocks
    if not sizes or min(sizes) < 1:
        problem = "is not a list of windows of 1 block or more"
        yield _problem("local_window_blocks", sizes, problem, "use one like (4,)")


def _ranges(given: schema.Sparsity) -> Iterator[Problem]:
    starts, ends = given.global_block_indices, given.global_block_end_indices
    if any(start < 0 for start in starts):
        problem, remedy = "counts blocks from 0", "use one like (0,)"
        yield _problem("global_block_indices", starts, problem, remedy)
    if not ends:
        return
    pairs = zip(starts, ends, strict=False)
    if len(starts) != len(ends) or any(start >= end for start, end in pairs):
        problem = f"does not end each of model.sparsity.global_block_indices={starts}"
        remedy = "give one end after each start, or () for single blocks"
        yield _problem("global_block_end_indices", ends, problem, remedy)


def _counts(model: schema.Model) -> Iterator[Problem]:
    given = model.sparsity
    num_blocks = -(-model.max_length // given.block)
    for name in _COUNTS:
        count = getattr(given, name)
        if given.mode in MODES[name] and count > num_blocks:
            problem = f"is more than the {num_blocks} blocks of model.max_length="
            problem += f"{model.max_length}"
            yield _problem(name, count, problem, f"use at most {num_blocks}")


def _problem(name: str, value: object, problem: str, remedy: str) -> Problem:
    return Problem(f"model.sparsity.{name}", value, problem, remedy)
