"""Length buckets: batches of one length, with a constant number of tokens."""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from zjax.errors import Problem
from zjax.schedule.dropping import Picks
from zjax.schedule.lengths import CUTS, divisor_problems, in_steps, token_problems
from zjax.schedule.pacing import Pacing, below_problems, hold, make_pacing
from zjax.settings import schema

_MIXTURE = 5
"""Purpose in the random key of bucket draws; `zjax.data` uses other numbers."""
_PACING = "buckets.order.pacing"


def bucket_lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """Tokens per row of each bucket, ascending, each twice the bucket before.

    Example:
        >>> bucket_lengths(256, 1024)
        (256, 512, 1024)
    """
    # `bucket_problems` has checked that the ratio is a power of two.
    return tuple(shortest << i for i in range((longest // shortest).bit_length()))


def bucket_rows(lengths: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """Rows of a batch of each bucket; batches of all buckets have equally many tokens.

    `num_rows` are the rows of the longest bucket.

    Example:
        >>> bucket_rows((256, 512, 1024), num_rows=8)
        (32, 16, 8)
    """
    return tuple(num_rows * lengths[-1] // length for length in lengths)


def num_open_buckets(
    order: schema.Weighted, lengths: tuple[int, ...], config: schema.Config
) -> Pacing:
    """Paces how many buckets, from the shortest on, a step from 1 on may draw."""
    if not isinstance(order, schema.Paced):
        return hold(len(lengths))
    pacing = make_pacing(in_steps(config, order.pacing))
    numbers = [sum(length <= value for length in lengths) for value in pacing.values]
    # Several lengths of the pacing may open the same number of buckets.
    is_new = [i for i in range(len(numbers)) if i == 0 or numbers[i] > numbers[i - 1]]
    firsts = tuple(pacing.firsts[i] for i in is_new)
    return Pacing(firsts, tuple(numbers[i] for i in is_new))


def bucket_picks(
    order: schema.Weighted, lengths: tuple[int, ...], config: schema.Config
) -> Picks:
    """Makes the draws of buckets by weight, for orders other than by epochs."""
    weights = np.array(order.weights or [1.0] * len(lengths))
    num_open = num_open_buckets(order, lengths, config)
    return Picks((config.seed, _MIXTURE), weights, num_open, num_draws=1)


def rate_factors(
    settings: schema.Buckets, longest: int
) -> Float32[np.ndarray, " buckets"]:
    """Factor of the learning rate for a batch of each bucket.

    Reference:
        Linear: Goyal et al., arXiv:1706.02677. Root: Krizhevsky, arXiv:1404.5997.
    """
    power = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}[settings.learning_rate]
    # Batches have equally many tokens: rows grow as lengths fall.
    ratios = longest / np.array(bucket_lengths(settings.shortest, longest))
    return (ratios**power).astype(np.float32)


def bucket_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `buckets` that show without the data."""
    settings, longest = config.buckets, config.data.length
    if not settings:
        return
    field, shortest = "buckets.shortest", settings.shortest
    ratio, rest = divmod(longest, shortest)
    if rest or ratio < 2 or ratio & (ratio - 1):  # `&`: not a power of two
        problem = f"is not data.length={longest} over a power of two"
        remedy = "halve data.length once or more"
        yield Problem(field, shortest, problem, remedy)
        return
    yield from divisor_problems(field, shortest, config, num_devices)
    if isinstance(settings.order, schema.Weighted):
        num_buckets = len(bucket_lengths(shortest, longest))
        yield from _weight_problems(settings.order.weights, num_buckets)
    yield from _rate_problems(settings, config.precision)
    yield from _conflicts(settings.kind, config)
    if isinstance(settings.order, schema.Paced):
        pacing = settings.order.pacing
        found = [*token_problems(_PACING, pacing, config)]
        yield from found
        # Only these kinds have a start that is safe to read beside other problems.
        if not found or isinstance(pacing, schema.Growing):
            least = field, shortest
            yield from below_problems(_PACING, pacing, "start", least)


def _weight_problems(weights: tuple[float, ...], num_buckets: int) -> Iterator[Problem]:
    """Yields problems of the weights of an order."""
    field = "buckets.order.weights"
    if weights and len(weights) != num_buckets:
        problem = f"has {len(weights)} numbers for {num_buckets} buckets"
        yield Problem(field, weights, problem, f"give {num_buckets}, shortest first")
    if not all(0 < weight < math.inf for weight in weights):
        yield Problem(field, weights, "is not above 0", "use numbers above 0")


def _rate_problems(
    settings: schema.Buckets, precision: schema.Precision
) -> Iterator[Problem]:
    """Yields reasons why the schedule cannot know the buckets of the steps."""
    field = "buckets.learning_rate"
    if settings.learning_rate == "constant":
        return
    if not isinstance(settings.order, schema.Mixture | schema.Paced):
        problem = "needs the order before the data, and buckets.order="
        problem += f"{settings.order.kind!r} follows from their sizes"
        remedy = "use 'constant', or buckets.order='mixture' or 'pacing'"
        yield Problem(field, settings.learning_rate, problem, remedy)
    if precision.on_nonfinite == "skip":
        problem = "counts applied steps, which precision.on_nonfinite='skip' may shift "
        problem += "against the batches"
        remedy = "use 'constant', or precision.on_nonfinite='stop'"
        yield Problem(field, settings.learning_rate, problem, remedy)
    if precision.compute_dtype == "float16":
        problem = "counts applied steps, and precision.compute_dtype='float16' skips "
        problem += "some"
        remedy = "use 'constant', or compute in bfloat16"
        yield Problem(field, settings.learning_rate, problem, remedy)


def _conflicts(kind: str, config: schema.Config) -> Iterator[Problem]:
    """Yields settings that do not work beside buckets of a kind."""
    if config.data.source == "synthetic":
        problem = "finds no documents in data.source='synthetic'"
        remedy = "use None, or data of documents"
        yield Problem("buckets", kind, problem, remedy)
    if isinstance(config.sequence_warmup, CUTS):
        problem = f"has no effect with buckets={kind!r}"
        remedy = "leave it out, or use buckets.order='pacing'"
        yield Problem("sequence_warmup", config.sequence_warmup.kind, problem, remedy)
    if config.curriculum.metrics:
        metrics = tuple(metric.index for metric in config.curriculum.metrics)
        problem = f"do not order buckets={kind!r}"
        remedy = "leave it at (), or use buckets=None"
        yield Problem("curriculum.metrics", metrics, problem, remedy)
