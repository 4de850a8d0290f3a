"""Balance: which data shard reads and writes a sequence."""

from collections.abc import Sequence as List

from zjax.generation.sequence import Sequence
from zjax.generation.slots import Slots


def rank_shards(
    sequence: Sequence, shards: List[Slots], num_rows: List[int], share: int
) -> list[int]:
    """Returns the numbers of the shards with room for a row, the cheapest first.

    A shard reads the tokens of a prompt that the pool of the shard lacks. A row beyond
    the share of a shard costs as many tokens as the sequence is to write: samples of a
    prompt stay together while other prompts keep other shards busy, and spread where
    these would be idle. Of equal costs, the shard with the fewest rows is first.

    `num_rows` are the rows that each shard has, or is about to have, and `share` is the
    number of all sequences, running or waiting, over the number of shards.
    """

    def cost(shard: int) -> tuple[int, int]:
        num_missing = len(sequence.tokens) - shards[shard].count_found(sequence)
        num_excess = max(num_rows[shard] + 1 - share, 0)
        return num_missing + num_excess * sequence.num_left, num_rows[shard]

    pairs = enumerate(zip(shards, num_rows, strict=True))
    free = [shard for shard, (slots, rows) in pairs if rows < slots.max_rows]
    return free if len(free) == 1 else sorted(free, key=cost)
