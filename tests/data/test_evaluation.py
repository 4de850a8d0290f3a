"""An evaluation set is read once, in one order, in batches of one size."""

import collections
import math

import numpy as np
import pytest

from tests.data.test_batches import shardings
from tests.support import squares
from tests.support.refusals import config_error, data_error
from zjax.data import evaluation
from zjax.settings import schema
from zjax.typing import Entry


def make_config(num_batches, seed=0, **settings):
    number = schema.Evaluation(num_batches=num_batches)
    return schema.Config(seed=seed, global_batch_size=8, evaluation=number, **settings)


def wrap(given, num_batches, seed=0):
    config = make_config(num_batches, seed)
    return evaluation.find_evaluation(config, shardings, evaluation_batches=given)


def read(opened):
    with opened.open_batches() as parts:
        return [(part.num_rows, part.batch["x"].tolist()) for part in parts]


def rows_of(parts):
    """Each row as often as it counts, from batches in which all stand equally often."""
    found = []
    for num_rows, batch in parts:
        counts = collections.Counter(batch)
        assert len(batch) == 8
        assert set(counts.values()) == {8 // num_rows}
        found += counts
    return sorted(found)


@pytest.mark.parametrize("num_rows", range(1, 20))
def test_every_row_comes_once(num_rows):
    columns = wrap(squares.rows(num_rows), evaluation.ALL)
    assert rows_of(read(columns)) == list(range(num_rows))
    assert columns.description == f"{num_rows} of {num_rows} rows"


@pytest.mark.parametrize("batch_size", [1, 7, 8, 12, 96])
def test_the_parts_of_what_is_left_divide_the_batch(batch_size):
    for num_rows in range(batch_size):
        sizes = evaluation.group_sizes(num_rows, batch_size)
        assert sum(sizes) == num_rows
        assert all(batch_size % size == 0 for size in sizes)
    assert len(evaluation.group_sizes(95, 96)) == 4


@pytest.mark.parametrize(
    ("num_batches", "num_rows"), [(1, 8), (2, 16), (3, 20), (4, 20), (-1, 20)]
)
def test_a_number_of_batches_takes_the_first_rows_of_one_order(num_batches, num_rows):
    """Fails if the seed of the run reaches the order, or rows come twice."""
    found = [read(wrap(squares.rows(20), num_batches, seed)) for seed in (0, 5)]
    whole = wrap(squares.rows(20), -1)
    assert found[0] == found[1]
    assert len(rows_of(found[0])) == num_rows
    assert read(whole)[: num_rows // 8] == found[0][: num_rows // 8]


def test_a_set_is_read_anew_each_time():
    opened = wrap(squares.rows(11), 8)
    assert read(opened) == read(opened)


def test_batches_of_a_list_may_be_small():
    given = [{"x": np.arange(8.0)}, {"x": np.arange(8.0, 15.0), "scale": 2.0}]
    opened = wrap(given, 8)
    assert [size for size, _ in read(opened)] == [8, 4, 2, 1]
    assert rows_of(read(opened)) == list(range(15))
    one = wrap(given, 1)
    assert rows_of(read(one)) == list(range(8))
    assert one.description == "up to 1 batches of evaluation_batches"


class Shuffled:
    """Batches in another order each time, as a loader that shuffles gives them."""

    def __init__(self):
        self.batches = [{"x": np.full(8, n, np.float32)} for n in range(3)]

    def __iter__(self):
        self.batches.reverse()
        return iter(self.batches)


@pytest.mark.parametrize(
    ("given", "is_told"), [(Shuffled(), True), (Shuffled().batches, False)]
)
def test_batches_that_change_between_evaluations_are_told(given, is_told, caplog):
    opened = wrap(given, 8)
    read(opened)
    assert caplog.messages == []
    read(opened)
    said = (
        "evaluation_batches are other ones than at the first evaluation: their means "
        "cannot be compared"
    )
    assert caplog.messages == [said] * is_told


def test_arrays_without_rows_stay_whole_in_a_small_batch():
    """Fails if a table of the loss is repeated, or its size taken for that of rows."""
    batch = {"x": np.arange(6.0), "table": np.arange(3.0)}
    entries = {"table": Entry((3,)), "x": Entry(("B",))}
    parts = list(evaluation.fill_batches(batch, 8, "batch", entries))
    assert [part.num_rows for part in parts] == [4, 2]
    assert parts[1].batch["x"].tolist() == [4, 5] * 4
    assert parts[1].batch["table"].tolist() == [0, 1, 2]


def test_a_batch_that_is_too_large_is_refused():
    opened = wrap([{"x": np.zeros(8)}, {"x": np.zeros((9, 2))}], 8)
    with data_error(
        "evaluation_batches[1]=9 rows are not 1 to global_batch_size=8; cut the "
        "evaluation data into such batches"
    ):
        read(opened)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (iter([]), "list_iterator"),
        (({} for _ in range(3)), "generator"),
        (map(str, ()), "map"),
    ],
)
def test_an_iterator_is_refused_by_name(given, name):
    with data_error(
        f"evaluation_batches='{name}' is an iterator, which gives other batches at "
        "each evaluation; give an iterable that starts anew, such as a list"
    ):
        wrap(given, 8)


def test_rows_that_never_end_cannot_all_be_taken():
    config = make_config(-1, data=schema.Data(source="synthetic", length=4))
    with config_error(
        "evaluation.num_batches=-1 asks for all of 1,099,511,627,776 synthetic rows; "
        "use a number of batches, such as 8"
    ):
        evaluation.find_evaluation(config, shardings)


def test_synthetic_rows_of_evaluation_are_those_of_every_seed():
    def tokens(seed):
        data = schema.Data(source="synthetic", length=8)
        config = make_config(2, seed, data=data)
        with evaluation.find_evaluation(config, shardings).open_batches() as parts:
            return [part.batch["tokens"].tolist() for part in parts]

    assert tokens(0) == tokens(7)


def test_batches_count_by_their_rows_and_weights():
    def metrics(loss, weight):
        return {"loss": np.float32(loss), "weight": np.float32(weight), "hit": loss / 2}

    mean = evaluation.mean_over_rows([(8, metrics(2, 10)), (2, metrics(4, 20))])
    assert mean == {"loss": (8 * 10 * 2 + 2 * 20 * 4) / 120, "hit": 320 / 120 / 2}


def test_rows_without_weight_count_for_nothing_and_alone_have_no_mean():
    nothing = {"loss": math.nan, "weight": 0.0}
    mean = evaluation.mean_over_rows([(8, nothing), (8, {"loss": 1.0, "weight": 3.0})])
    assert mean == {"loss": 1.0}
    assert math.isnan(evaluation.mean_over_rows([(8, nothing)])["loss"])
