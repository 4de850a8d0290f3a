"""Masked language modelling: hides tokens of an encoder by seed, step and row alone.

Of the tokens to predict, 80 % become the mask token, 10 % random tokens, and 10 % stay
(arXiv:1810.04805, section 3.1). Each step draws anew, so that every epoch hides
different tokens.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int32, Int64

from zjax.data import source, store
from zjax.data.draws import Draw, Draws
from zjax.data.packing import Rows
from zjax.errors import DataError, Problem
from zjax.settings import schema

HIDDEN, REPLACED = 0.8, 0.1
"""Shares of the tokens to predict that are hidden, and replaced by random tokens."""
NAMES = ("[MASK]", "<mask>")
"""Names of the mask token, as in BERT and RoBERTa."""
_STREAM = 0x4D4C4D
"""Separates the random numbers from the numbers of synthetic rows."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How rows are masked.

    Args:
        num_ids: Number of ids from which random tokens are drawn.
        kept_ids: Ids that are never predicted, such as the end of a text.
    """

    seed: int
    fraction: float
    mask_id: int
    num_ids: int
    kept_ids: tuple[int, ...]

    def apply(
        self, tokens: Int32[np.ndarray, " L"], step: int, row: int
    ) -> tuple[Int32[np.ndarray, " L"], Bool[np.ndarray, " L"]]:
        """Masks one row; returns the tokens to read, and which are to be predicted."""
        # By row, so that masks do not depend on the number of processes.
        generator = np.random.default_rng([_STREAM, self.seed, step, row])
        chosen = generator.random(len(tokens)) < self.fraction
        chosen &= ~np.isin(tokens, self.kept_ids)
        # Drawn for all tokens, so that the numbers do not depend on the tokens chosen.
        fate = generator.random(len(tokens))
        # Only ids of the tokenizer, not the padding of the vocabulary.
        others = generator.integers(self.num_ids, size=len(tokens))
        masked = np.where(chosen & (fate < HIDDEN), self.mask_id, tokens)
        masked = np.where(chosen & (fate >= 1 - REPLACED), others, masked)
        return masked.astype(np.int32), chosen


@dataclasses.dataclass(frozen=True)
class MaskedRows:
    """Rows with the masks of one step."""

    rows: Rows
    rule: Rule
    step: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads and masks rows; padding is never predicted."""
        batch = self.rows.read(indices)
        tokens = batch["tokens"]
        pairs = zip(tokens, indices.tolist(), strict=True)
        masked, chosen = zip(
            *(self.rule.apply(row, self.step, number) for row, number in pairs),
            strict=True,
        )
        weights = np.stack(chosen)
        if "segment_ids" in batch:
            weights &= batch["segment_ids"] > 0
        fields = {"tokens": np.stack(masked), "targets": tokens}
        return batch | fields | {"weights": weights.astype(np.float32)}

    def digest(self) -> str:
        """Checksum of the unmasked rows."""
        return self.rows.digest()


@dataclasses.dataclass(frozen=True)
class MaskedDraws:
    """Draws batches and masks the rows anew in each step."""

    draws: Draws
    rule: Rule

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches can have."""
        return self.draws.sizes

    def draw(self, step: int) -> Draw:
        """Draws the batch of a step, masked."""
        rows, indices = self.draws.draw(step)
        return Draw(MaskedRows(rows, self.rule, step), indices)


def make_rule(data: schema.Data, vocab_size: int, seed: int) -> Rule:
    """Makes the rule that masks the data of an encoder."""
    tokenizer = source.open_tokenizer(data, vocab_size)
    if data.source == "tokens" and store.read_meta(data.path).has_answers:
        problem = "holds conversations, of which answers alone have a loss"
        remedy = "prepare them as texts, or use model.kind='decoder'"
        raise DataError(Problem("data.path", data.path, problem, remedy))
    ids = {name: tokenizer.special_tokens.get(name) for name in NAMES}
    found = [id_ for id_ in ids.values() if id_ is not None]
    # The first id beyond the tokenizer may be free in a padded vocabulary.
    given, free = data.masking.mask_id, tokenizer.vocab_size
    if given != -1:
        found = [given]
    elif not found and free < vocab_size:
        found = [free]
    if not found:
        problem = f"finds no {' or '.join(NAMES)} in the tokenizer, nor an id of the "
        problem += f"model beyond the {free} of the tokenizer"
        remedy = "set the id of a token that hides others"
        if data.source != "synthetic":
            remedy += f", or model.vocab_size={free + 1}"
        raise DataError(Problem("data.masking.mask_id", -1, problem, remedy))
    # Special tokens structure a text and are not predicted.
    special = {*tokenizer.special_tokens.values(), *tokenizer.end_ids, found[0]}
    special |= set() if tokenizer.bos_id is None else {tokenizer.bos_id}
    fraction = data.masking.fraction
    return Rule(seed, fraction, found[0], free, tuple(sorted(special)))
