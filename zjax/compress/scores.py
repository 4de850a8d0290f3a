"""Losses and greedy tokens of held-out rows, from the outputs of the last block."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.compress.opened import Opened
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.heads import token_weights
from zjax.models.recording import head_logits
from zjax.typing import IGNORED

_MAX_EXPONENT = 700
"""Largest loss whose exponential is a finite number."""


class Score(NamedTuple):
    """Score of weights on held-out rows."""

    loss: float
    """Mean cross-entropy in nats per token."""
    agreement: float
    """Share of tokens with the most likely next token of the weights before."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss) if self.loss < _MAX_EXPONENT else math.inf


class Scorer:
    """Scores carries of the last block.

    Args:
        opened: Decoder with shapes alone.
        outside: Parameters outside of the blocks.
    """

    def __init__(self, opened: Opened, outside: Any):
        config = opened.config.model
        logits_of = head_logits(opened.decoder)
        table = outside["embedding"]["tokens"] if config.tied_head else None
        self._head = outside["head"], table

        @jax.jit
        def run(params: Any, carry: Float[Array, "B L M"], batch: Any) -> Any:
            targets, weights = batch["targets"], token_weights(batch)

            # Row by row, as logits of a large vocabulary fill the device.
            def one(row: Any) -> Any:
                x, targets, weights = row
                logits = logits_of(*params, x[None])[0]
                counted = jnp.where(targets == IGNORED, 0.0, weights)
                chosen = jnp.maximum(targets, 0)
                picked = jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
                losses = jax.nn.logsumexp(logits, axis=1) - picked
                return (counted * losses).sum(), counted, logits.argmax(axis=1)

            return jax.lax.map(one, (carry, targets, weights))

        self._run = run

    def __call__(
        self,
        carries: Sequence[Any],
        batches: Sequence[Mapping[str, np.ndarray]],
        expected: Sequence[np.ndarray] | None,
    ) -> tuple[Score, list[np.ndarray]]:
        """Scores batches; returns greedy tokens, too, to compare other weights with."""
        loss = count = equal = 0.0
        found = list[np.ndarray]()
        for number, (carry, batch) in enumerate(zip(carries, batches, strict=True)):
            with dtype_promotion():
                results = self._run(self._head, carry, dict(batch))
            losses, weights, tokens = jax.device_get(results)
            other = tokens if expected is None else expected[number]
            loss += float(losses.sum())
            count += float(weights.sum())
            equal += float((weights * (tokens == other)).sum())
            found.append(tokens)
        count = max(count, 1.0)
        return Score(loss / count, equal / count), found
