"""Passes that compile no more of the choice of tokens than the rows of a test ask for.

The choice is more than half of the program of a small model, and takes half of the time
of the compiler. A row that asks for more than is compiled gets wrong tokens, or scores
that are NaN.
"""

import contextlib
import contextvars
import functools

import jax.numpy as jnp
import pytest

from zjax.generation import programs, recomputed, sampling

ALL, DRAWS, BEST = "all", "draws", "best"
ASKED = contextvars.ContextVar("asked", default=ALL)
"""What is compiled: all; neither penalties nor filters; the most likely token alone.

The thread that traces a program knows, so that no other thread compiles less.
"""
CHOOSE, TRANSFORM = sampling._choose_as_asked, sampling._if_any


@contextlib.contextmanager
def compiling(asked):
    """Leaves out of passes what no row asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_choose_as_asked", _choose)
        patch.setattr(sampling, "_if_any", _transform)
        for name in ("run_pass", "run_steps"):
            run = getattr(programs, name)
            patch.setattr(programs, f"_{name}", functools.partial(_jit, run, asked))
        run = recomputed.RecomputedPasses._run  # each generator compiles its own
        patch.setattr(recomputed.RecomputedPasses, "_run", _asking(run, asked))
        yield


@functools.cache
def _jit(run, asked, placed):
    """Makes a program of passes that is apart from those of all other tests."""
    return programs._jit_by_shard(_asking(run, asked), placed)


def _asking(run, asked):
    """Tells what is asked while a function is traced."""

    @functools.wraps(run)
    def traced(*args, **kwargs):
        before = ASKED.set(asked)
        try:
            return run(*args, **kwargs)
        finally:
            ASKED.reset(before)

    return traced


def _choose(raw, rows, known, num_best, log_partition):
    if ASKED.get() != BEST:
        return CHOOSE(raw, rows, known, num_best, log_partition)
    num_rows = raw.shape[0]
    return sampling.Chosen(
        tokens=jnp.zeros(num_rows, jnp.int32),
        logprobs=jnp.full(num_rows, jnp.nan, jnp.float32),
        best_ids=jnp.zeros((num_rows, num_best), jnp.int32),
        best_logprobs=jnp.full((num_rows, num_best), jnp.nan, jnp.float32),
    )


def _transform(asks, transform, logits, *settings):
    if ASKED.get() == ALL:
        return TRANSFORM(asks, transform, logits, *settings)
    return jnp.where(asks.any(), jnp.nan, logits)
