"""Length buckets: batches of one length, with a constant number of tokens."""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from zjax.errors import Problem
from zjax.schedule.curriculum import Picks
from zjax.schedule.lengths import CUTS, divisor_problems, in_steps, token_problems
from zjax.schedule.pacing import Pacing, below_problems, hold, make_pacing
from zjax.settings import schema

_MIXTURE = 5
"""Purpose in the random key of bucket draws; `zjax.data` uses other numbers."""
_PACING = "buckets.pacing"


def bucket_lengths(config: schema.Config) -> tuple[int, ...]:
    """Tokens per row of each bucket, ascending, each twice the bucket before.

    Example:
        >>> buckets = schema.Buckets(form="cut", shortest=256)
        >>> bucket_lengths(schema.Config(buckets=buckets))
        (256, 512, 1024)
    """
    shortest, longest = config.buckets.shortest, config.data.length
    # `bucket_problems` has checked that the ratio is a power of two.
    return tuple(shortest << i for i in range((longest // shortest).bit_length()))


def bucket_rows(config: schema.Config) -> tuple[int, ...]:
    """Rows of a batch of each bucket; batches of all buckets have equally many tokens.

    Example:
        >>> buckets = schema.Buckets(form="cut", shortest=256)
        >>> bucket_rows(schema.Config(buckets=buckets, global_batch_size=8))
        (32, 16, 8)
    """
    num_tokens = config.global_batch_size * config.data.length
    return tuple(num_tokens // length for length in bucket_lengths(config))


def num_open_buckets(config: schema.Config) -> Pacing:
    """Paces how many buckets, from the shortest on, a step from 1 on may draw."""
    settings, lengths = config.buckets, bucket_lengths(config)
    if settings.order != "pacing":
        return hold(len(lengths))
    pacing = make_pacing(in_steps(config, settings.pacing))
    numbers = [sum(length <= value for length in lengths) for value in pacing.values]
    # Several lengths of the pacing may open the same number of buckets.
    is_new = [i for i in range(len(numbers)) if i == 0 or numbers[i] > numbers[i - 1]]
    firsts = tuple(pacing.firsts[i] for i in is_new)
    return Pacing(firsts, tuple(numbers[i] for i in is_new))


def bucket_picks(config: schema.Config) -> Picks:
    """Makes the draws of buckets by weight, for orders other than by epochs."""
    weights = config.buckets.weights or [1.0] * len(bucket_lengths(config))
    key = (config.seed, _MIXTURE)
    return Picks(key, np.array(weights), num_open_buckets(config), num_draws=1)


def rate_factors(config: schema.Config) -> Float32[np.ndarray, " buckets"]:
    """Factor of the learning rate for a batch of each bucket.

    Example:
        >>> buckets = schema.Buckets(form="pad", learning_rate="sqrt")
        >>> config = schema.Config(buckets=buckets)
        >>> [round(float(factor), 2) for factor in rate_factors(config)]
        [2.0, 1.41, 1.0]

    Reference:
        Linear: Goyal et al., arXiv:1706.02677. Root: Krizhevsky, arXiv:1404.5997.
    """
    power = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}[config.buckets.learning_rate]
    ratios = np.array(bucket_rows(config)) / config.global_batch_size
    return (ratios**power).astype(np.float32)


def bucket_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `buckets` that show without the data."""
    settings, longest = config.buckets, config.data.length
    if settings.form == "none":
        return
    field, shortest = "buckets.shortest", settings.shortest
    ratio, rest = divmod(longest, shortest)
    if rest or ratio < 2 or ratio & (ratio - 1):  # `&`: not a power of two
        problem = f"is not data.length={longest} over a power of two"
        remedy = "halve data.length once or more"
        yield Problem(field, shortest, problem, remedy)
        return
    yield from divisor_problems(field, shortest, config, num_devices)
    yield from _weight_problems(config)
    yield from _rate_problems(config)
    yield from _conflicts(config)
    if settings.order == "pacing":
        found = [*token_problems(_PACING, settings.pacing, config)]
        yield from found
        # Only these kinds have a start that is safe to read beside other problems.
        if not found or settings.pacing.kind in ("linear", "root"):
            least = field, shortest
            yield from below_problems(_PACING, settings.pacing, "start", least)


def _weight_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields problems of `buckets.weights`."""
    weights, num_buckets = config.buckets.weights, len(bucket_lengths(config))
    field = "buckets.weights"
    if weights and config.buckets.order == "shuffle":
        problem = "has no effect with buckets.order='shuffle'"
        yield Problem(field, weights, problem, "leave it at (), or use another order")
    elif weights and len(weights) != num_buckets:
        problem = f"has {len(weights)} numbers for {num_buckets} buckets"
        yield Problem(field, weights, problem, f"give {num_buckets}, shortest first")
    if not all(0 < weight < math.inf for weight in weights):
        yield Problem(field, weights, "is not above 0", "use numbers above 0")


def _rate_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields reasons why the schedule cannot know the buckets of the steps."""
    field, settings = "buckets.learning_rate", config.buckets
    if settings.learning_rate == "constant":
        return
    if settings.order in ("shuffle", "grow"):
        problem = "needs the order before the data, and buckets.order="
        problem += f"{settings.order!r} follows from their sizes"
        remedy = "use 'constant', or buckets.order='mixture' or 'pacing'"
        yield Problem(field, settings.learning_rate, problem, remedy)
    if config.precision.on_nonfinite == "skip":
        problem = "counts applied steps, which precision.on_nonfinite='skip' may shift "
        problem += "against the batches"
        remedy = "use 'constant', or precision.on_nonfinite='stop'"
        yield Problem(field, settings.learning_rate, problem, remedy)
    if config.precision.compute_dtype == "float16":
        problem = "counts applied steps, and precision.compute_dtype='float16' skips "
        problem += "some"
        remedy = "use 'constant', or compute in bfloat16"
        yield Problem(field, settings.learning_rate, problem, remedy)


def _conflicts(config: schema.Config) -> Iterator[Problem]:
    """Yields settings that do not work beside buckets."""
    settings = config.buckets
    if config.data.source == "synthetic":
        problem = "finds no documents in data.source='synthetic'"
        remedy = "use 'none', or data of documents"
        yield Problem("buckets.form", settings.form, problem, remedy)
    if config.sequence_warmup.form in CUTS:
        problem = f"has no effect with buckets.form={settings.form!r}"
        remedy = "leave it at 'none', or use buckets.order='pacing'"
        form = config.sequence_warmup.form
        yield Problem("sequence_warmup.form", form, problem, remedy)
    if config.curriculum.metrics:
        metrics = tuple(metric.index for metric in config.curriculum.metrics)
        problem = f"do not order buckets.form={settings.form!r}"
        remedy = "leave it at (), or use buckets.form='none'"
        yield Problem("curriculum.metrics", metrics, problem, remedy)
