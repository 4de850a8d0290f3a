"""The length of a run as a number of passes over the training rows."""

import fractions
from collections.abc import Iterator

from zjax.config import axes, derived, schema
from zjax.errors import Problem


def steps_of(num_epochs: float, num_rows: int, global_batch_size: int) -> int:
    """Computes the steps that draw each of the rows `num_epochs` times.

    The last batch also draws rows of the next epoch where it is not full.

    Args:
        num_epochs: Passes over the rows, above 0.
        num_rows: Rows of an epoch, 1 or more.
        global_batch_size: Rows of a step, 1 or more.

    Returns:
        Number of steps, 1 or more.

    Example:
        >>> steps_of(2.0, 1_024, 16), steps_of(0.5, 1_025, 16)
        (128, 33)
    """
    # As written: the float nearest to 1.1 is larger, and would take a step more.
    drawn = fractions.Fraction(repr(float(num_epochs))) * num_rows
    return -(-drawn // global_batch_size)


def beside_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields a problem for a number of steps that is set beside `num_epochs`."""
    if config.num_epochs and not derived.is_offered(config.num_steps):
        problem = f"has no effect with num_epochs={config.num_epochs!r}"
        remedy = "leave it out, or set num_epochs=0"
        yield Problem("num_steps", config.num_steps, problem, remedy)


def epoch_problems(config: schema.Config, *, user_batches: bool) -> Iterator[Problem]:
    """Yields a problem for each setting that `num_epochs` cannot work with.

    Args:
        config: Settings of the right types.
        user_batches: Whether the caller brings batches; then `data.source` is not read.
    """
    epochs = config.num_epochs
    if not epochs:
        return
    if config.num_tokens:
        problem = f"ends the run, as does num_epochs={epochs!r}"
        yield Problem("num_tokens", config.num_tokens, problem, "leave it at 0")
    unknown = {
        "data.source='synthetic'": config.data.source == "synthetic"
        and not user_batches,
        f"buckets.form={config.buckets.form!r}": config.buckets.form != "none",
        "sequence_warmup.form='reshape'": config.sequence_warmup.form == "reshape",
        "curriculum.metrics": bool(config.curriculum.metrics),
    }
    for given, holds in unknown.items():
        if holds:
            problem = f"gives no number of steps with {given}"
            yield Problem("num_epochs", epochs, problem, "set num_steps")
    is_open = any(getattr(config.mesh, axis) == 0 for axis in axes.OPEN_AXES)
    if is_open and not config.global_batch_size:
        problem = "gives no number of steps before the mesh is chosen"
        yield Problem("num_epochs", epochs, problem, "set global_batch_size")


def uncounted_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a problem for `num_epochs` where nobody has counted the rows."""
    if config.num_epochs:
        problem = "needs the number of rows, which only zjax.Trainer counts"
        yield Problem("num_epochs", config.num_epochs, problem, "set num_steps")
