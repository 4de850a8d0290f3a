"""Minibatches: splits a rollout into the packed batches of the optimizer steps."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zjax.rl.packing import Aggregation, Packed, Sampled, pack

_NUM_SHAPES = 8
"""Most numbers of rows of the batches of a run: each is a program to compile."""


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """How the texts of a rollout become batches.

    Args:
        num_texts: Texts of an optimizer step.
        row_multiple: Divisor of the rows of a batch: shards times microbatches.
        length: Tokens of a row.
        aggregation: Aggregation of the losses of tokens.
        constant: Length of `constant_mean`; 0 for others.
        num_epochs: Times that a text is learned from.
        seed: Seed of the order of texts.
        experts: Number of layers with experts, and of experts of a token; empty for a
            model without experts.
    """

    num_texts: int
    row_multiple: int
    length: int
    aggregation: Aggregation
    constant: int
    num_epochs: int
    seed: int
    experts: tuple[int, ...] = ()

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that batches may have, ascending.

        A row holds a text at least, so that the largest number always suffices.

        Example:
            >>> Minibatches(512, 8, 1_024, "token_mean", 0, 1, 0).row_counts[:3]
            (64, 128, 192)
        """
        units = self.num_texts // self.row_multiple
        shares = range(1, _NUM_SHAPES + 1)
        counts = {math.ceil(units * share / _NUM_SHAPES) for share in shares}
        return tuple(self.row_multiple * count for count in sorted(counts))

    def in_order(self, num_texts: int) -> Iterator[list[int]]:
        """Yields the numbers of texts in batches, in the order of the texts.

        Where texts are masked, steps have fewer, and nearly equal numbers of them.
        """
        number = math.ceil(num_texts / self.num_texts)
        for chosen in np.array_split(np.arange(num_texts), number) if number else ():
            yield chosen.tolist()

    def split(self, num_texts: int, step: int) -> Iterator[list[int]]:
        """Yields the numbers of the texts of each optimizer step on a rollout.

        Args:
            num_texts: Texts of the rollout.
            step: Optimizer steps before the rollout.
        """
        for epoch in range(self.num_epochs):
            order = np.arange(num_texts)
            if num_texts > self.num_texts:
                np.random.default_rng([self.seed, step, epoch]).shuffle(order)
            for chosen in self.in_order(num_texts):
                yield order[chosen].tolist()

    def pack(
        self,
        rollouts: Sequence[Sampled],
        advantages: Sequence[float | np.ndarray] | np.ndarray,
        arrays: Mapping[str, Sequence[np.ndarray]],
        chosen: Sequence[int],
    ) -> Packed:
        """Packs some texts of a rollout.

        Args:
            rollouts: Texts of the rollout.
            advantages: Advantage of each text, or of each token; NaN leaves a text out.
            arrays: Values of the tokens of each text, by name under `rl`.
            chosen: Numbers of the texts of the batch.
        """
        packed = pack(
            [rollouts[number] for number in chosen],
            [advantages[number] for number in chosen],
            length=self.length,
            num_rows=self.row_counts,
            aggregation=self.aggregation,
            constant=self.constant,
        )
        picked = {name: [x[n] for n in chosen] for name, x in arrays.items()}
        return packed.with_arrays(**picked)

    def example(self, arrays: Sequence[str] = (), num_more: int = 0) -> dict[str, Any]:
        """Describes the largest batch by shapes.

        Args:
            arrays: Names of arrays of tokens under `rl` besides those of `pack`.
            num_more: Number of rows besides the rows of texts.
        """
        experts = np.zeros((1, *self.experts), np.int16) if self.experts else None
        packed = self.pack([_Token(experts=experts)], [0.0], {}, [0])
        shape = self.row_counts[-1] + num_more, self.length
        batch = packed.with_arrays(**{x: packed.batch["weights"] for x in arrays}).batch
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[2:]), x.dtype), batch
        )


class _Token(NamedTuple):
    """A text of one token, as `pack` reads rollouts."""

    prompt_ids: tuple[int, ...] = (0,)
    ids: np.ndarray = np.zeros(1, np.int32)
    logprobs: np.ndarray = np.zeros(1, np.float32)
    experts: np.ndarray | None = None
