"""Rows that are cut, against slices by hand, and shared by processes."""

import numpy as np
import pytest

from zjax.data import draws, packing
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema

FULL, ROWS, SIZE = 16, 9, 4
STREAM = np.arange(FULL * ROWS + 1, dtype=np.uint16)


def make_config(microbatch_size=1):
    pacing = schema.LinearPacing(start=4, multiple=2, num_steps=6)
    return schema.Config(
        global_batch_size=SIZE,
        microbatch_size=microbatch_size,
        data=schema.Data(length=FULL),
        sequence_warmup=schema.Reshape(pacing=pacing),
    )


def make_draws(config):
    rows = packing.BlockRows(STREAM, FULL)
    order = draws.Sampler(3, ROWS, SIZE)
    return draws.ReshapedRows(rows, order, FULL, TrainingSchedule(config))


def pieces_by_hand(numbers, length, unit):
    """Tokens with the last target: the first piece of each row, then the second."""
    pieces = []
    for place in range(-(-(FULL + 1) // (length + 1))):
        start = min(place * (length + 1), FULL - length)
        for number in numbers:
            row = STREAM[number * FULL : (number + 1) * FULL + 1].tolist()
            pieces.append(row[start : start + length + 1])
    kept = -(-len(numbers) * (FULL + 1) // (length + 1))
    return pieces[: kept - kept % unit]


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_reshaped_rows_are_the_pieces_of_rows_in_order(microbatch_size):
    config = make_config(microbatch_size)
    lengths, made = [4, 6, 8, 10, 12, 16, 16], make_draws(config)
    tokens = 0
    for step in range(len(lengths)):
        lengths[step] = {1: 6, 2: 8, 3: 10, 4: 12, 5: 14}.get(step + 1, FULL)
        rows, indices = made.draw(step)
        numbers = made.order.indices(step).tolist()
        expected = pieces_by_hand(numbers, lengths[step], SIZE // microbatch_size)
        batch = rows.read(indices)
        assert batch["tokens"].tolist() == [piece[:-1] for piece in expected]
        assert batch["targets"].tolist() == [piece[1:] for piece in expected]
        assert len(indices) in made.sizes
        tokens += batch["tokens"].size
        assert made.schedule.tokens.sum_until(step + 1) == tokens


def test_every_row_of_a_reshaped_batch_is_seen():
    made = make_draws(make_config())
    for step in range(7):
        rows, indices = made.draw(step)
        first_tokens = STREAM[made.order.indices(step) * FULL]
        assert np.isin(first_tokens, rows.read(indices)["tokens"]).all()


def test_at_full_length_rows_are_whole():
    rows, indices = make_draws(make_config()).draw(6)
    whole = packing.BlockRows(STREAM, FULL).read(draws.Sampler(3, ROWS, 4).indices(6))
    assert rows.read(indices)["tokens"].tolist() == whole["tokens"].tolist()


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_read_the_parts_of_one_batch(num_processes):
    for step in range(7):
        rows, indices = make_draws(make_config()).draw(step)
        parts = np.split(indices, num_processes)
        read = [rows.read(part)["tokens"] for part in parts]
        whole = rows.read(indices)["tokens"]
        np.testing.assert_array_equal(np.concatenate(read), whole)
