"""Speculation: a pass reads drafts of the next tokens, and keeps the right ones.

Verification is exact without a rule of rejection. A draw depends on the logits, the
seed and the position alone, so that the token of each position is drawn as it would be
without drafts, and a draft is right if it is that token. Texts are the texts without
speculation, as far as the logits of a pass of several tokens are.

Reference: Leviathan et al. (arXiv:2211.17192) verify drafts of any model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.generation.sampling import Chosen, SamplingRows, choose_tokens
from zjax.typing import LogPartition, logsumexp


def verify(
    logits: Float[Array, "T R V"],
    drafts: Int[Array, "R D"],
    num_drafts: Int[Array, " R"],
    rows: SamplingRows,
    history: Int[Array, "R S"],
    prompt_lengths: Int[Array, " R"],
    lengths: Int[Array, " R"],
    *,
    num_best: int = 0,
    log_partition: LogPartition = logsumexp,
) -> Chosen:
    """Chooses tokens as far as drafts are right, and one more; -1 where none is chosen.

    Row t of `logits` follows the last known token and the first t of the D = T - 1
    drafts, of which a row has `num_drafts`, 0 to D. The other arguments are the
    arguments of `choose_tokens`; `history` need not have the drafts. A row may go on
    behind an end id: whoever appends the tokens stops there.
    """
    numbers = jnp.arange(logits.shape[0], dtype=jnp.int32)
    row_numbers = jnp.arange(logits.shape[1], dtype=jnp.int32)[:, None]
    columns = lengths[:, None] + numbers[None, :-1]
    # Penalties of a position read the drafts before it, which are right if it counts.
    history = history.at[row_numbers, columns].set(drafts, mode="drop")

    how = {"num_best": num_best, "log_partition": log_partition}

    def choose(logits, number):
        known = prompt_lengths, lengths + number
        return choose_tokens(logits, rows, history, *known, **how)

    chosen = jax.vmap(choose)(logits, numbers)
    is_draft = numbers[:-1, None] < num_drafts[None]
    is_right = is_draft & (drafts.T == chosen.tokens[:-1])
    num_right = jnp.cumprod(is_right.astype(jnp.int32), axis=0).sum(axis=0)
    is_chosen = numbers[:, None] <= num_right[None]
    return chosen._replace(tokens=jnp.where(is_chosen, chosen.tokens, -1))
