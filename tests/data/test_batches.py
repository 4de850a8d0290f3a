import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import sampling
from tests.support.squares import Columns
from zjax.data import batches as wrapping
from zjax.data import evaluation, placement, sums
from zjax.errors import DataError
from zjax.settings import schema
from zjax.typing import Entry

CONFIG = schema.Config(seed=3, global_batch_size=8)


def shardings(leaf):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P("data") if leaf.ndim else P())


def make_batches(num_batches):
    return [
        {"x": np.full((8, 2), float(n)), "scale": np.float32(n)}
        for n in range(num_batches)
    ]


def digest_of(given):
    chain = sums.BatchChain()
    return [chain.add(batch) for batch in given][-1]


@pytest.mark.parametrize(
    "dataset",
    [
        Columns({"x": [[n, n + 1] for n in range(20)], "y": list(range(20))}),
        [{"x": [n, n + 1], "y": n} for n in range(20)],
    ],
    ids=["columns", "rows"],
)
def test_columns_and_rows_are_sampled_by_seed_and_step(dataset):
    with wrapping.wrap_batches(dataset, CONFIG, shardings, start_step=4) as batches:
        for step in range(4, 8):
            rows = sampling.batch(step, 20, 3, 8)
            batch = next(batches)
            assert batch["y"].tolist() == rows
            assert batch["x"].tolist() == [[row, row + 1] for row in rows]
            assert batch["x"].sharding.is_equivalent_to(shardings(batch["x"]), 2)


def test_columns_of_unequal_rows_are_refused():
    dataset = Columns({"x": [[1], [2, 3]]})
    with pytest.raises(DataError) as error:
        next(wrapping.wrap_batches(dataset, CONFIG, shardings))
    assert str(error.value) == (
        "batches/x='object' is not a dtype of numbers (text, or rows of unequal "
        "length); turn it into token ids and pad them, or remove it"
    )


def wrap_evaluation(batches, config, shardings):
    return evaluation.find_evaluation(config, shardings, evaluation_batches=batches)


@pytest.mark.parametrize(
    ("wrap", "field"),
    [
        (wrapping.wrap_batches, "batches"),
        (wrap_evaluation, "evaluation_batches"),
    ],
)
def test_rows_of_other_fields_are_refused(wrap, field):
    with pytest.raises(DataError) as error:
        wrap([{"x": [1]}, {"y": [1]}], CONFIG, shardings)
    assert str(error.value) == (
        f"{field}[1]={{'y': (1,)}} is not of the shape {{'x': (1,)}} of row 0; give "
        "all rows the same fields and lengths, such as by padding"
    )


def test_dataset_without_rows_is_refused():
    with pytest.raises(DataError) as error:
        wrapping.wrap_batches(Columns({"x": []}), CONFIG, shardings)
    assert str(error.value) == "batches='Columns' has no rows; give one with rows"


class Splits(dict):
    """A mapping of datasets that looks like one of them, as a DatasetDict does."""

    column_names = ("x",)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            Splits(train=1, test=2),
            "batches='Splits' is a mapping; "
            "give one of its values, such as batches['train']",
        ),
        (
            {"x": np.zeros((8, 2))},
            "batches='dict' is a single batch; give a list of batches",
        ),
        (
            make_batches,
            "batches='make_batches' is a function; call it, and give what it returns",
        ),
        (Splits, "batches='Splits' is a class; call it, and give what it returns"),
        ("train", "batches='train' is a text; give a dataset or a list of batches"),
        (
            5,
            "batches='int' cannot be iterated over; "
            "give a dataset or a list of batches",
        ),
        (
            [[1, 2, 3], [4, 5, 6]],
            "batches='list' holds lists of tokens, which do not say what is predicted; "
            'give batches=[{"tokens": row[:-1], "targets": row[1:]} for row in rows]',
        ),
        (
            [{"x": [1, 2]}, {"x": [3, 4]}, {"x": [5]}],
            "batches[2]={'x': (1,)} is not of the shape {'x': (2,)} of row 0; give all "
            "rows the same fields and lengths, such as by padding",
        ),
        ([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}], ""),
        (make_batches(2), ""),
        (None, ""),
        ([], ""),
        (Columns({"x": []}), ""),
    ],
)
def test_what_is_no_dataset_and_no_batches_is_named(batches, message):
    found = wrapping.batches_problems("batches", batches)
    assert "\n".join(map(str, found)) == message


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "iterator"])
def test_batches_come_in_order_and_end(kind):
    given = kind(make_batches(5))
    with wrapping.wrap_batches(given, CONFIG, shardings, start_step=2) as batches:
        found = list(batches)
        state = batches.state()
    assert (state["step"], state["global_batch_size"]) == (5, 8)
    assert state["drawn"] == digest_of(make_batches(5))
    assert [float(batch["x"][7, 1]) for batch in found] == [2.0, 3.0, 4.0]
    assert [float(batch["scale"]) for batch in found] == [2.0, 3.0, 4.0]
    assert found[0]["x"].dtype == np.float32
    assert len(found[0]["x"].addressable_shards) == 8


def test_arrays_of_jax_are_placed_too():
    given = [{"x": jnp.arange(8.0)}]
    with wrapping.wrap_batches(given, CONFIG, shardings) as batches:
        batch = next(batches)
    assert batch["x"].sharding.is_equivalent_to(shardings(batch["x"]), 1)
    assert batch["x"].tolist() == list(range(8))


def test_an_iterable_resumes_by_drawing_again():
    with wrapping.wrap_batches(make_batches(6), CONFIG, shardings) as batches:
        next(batches)
        batches.set_state({"step": 4})
        assert [float(batch["scale"]) for batch in batches] == [4.0, 5.0]


def test_an_iterator_that_was_drawn_from_cannot_go_back():
    batches = wrapping.wrap_batches(iter(make_batches(6)), CONFIG, shardings)
    next(batches)
    batches.set_state({"step": 0})
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == (
        "batches='list_iterator' is an iterator that has been drawn from; give an "
        "iterable that starts anew, such as a list"
    )


def test_an_error_of_a_generator_arrives_with_its_traceback():
    def broken():
        yield make_batches(1)[0]
        raise RuntimeError("the disk is gone")

    batches = wrapping.wrap_batches(broken(), CONFIG, shardings)
    next(batches)
    with pytest.raises(RuntimeError, match="the disk is gone") as error:
        next(batches)
    assert "broken" in [entry.name for entry in error.traceback]


def test_a_partial_batch_is_named():
    given = [*make_batches(2), {"x": np.zeros((5, 2))}]
    with wrapping.wrap_batches(given, CONFIG, shardings) as batches:
        next(batches), next(batches)
        with pytest.raises(DataError) as error:
            next(batches)
    assert str(error.value) == (
        "batches[2]/x='float32[5, 2]' has 5 rows, but global_batch_size=8; make all "
        "batches that size and drop the last, partial one"
    )


def checked(**entries):
    return placement.BatchPlacement(shardings, entries)


def test_columns_are_checked_before_the_first_batch():
    dataset = Columns({"x": [[0, 1]] * 20, "extra": [0] * 20})
    asked = checked(x=Entry(("B", 3)), y=Entry(("B",), np.dtype("int32")))
    with pytest.raises(DataError) as error:
        wrapping.wrap_batches(dataset, CONFIG, asked)
    assert str(error.value) == (
        "batches/y=None is missing; give int32[B]\n"
        "batches/extra='int32[1]' is not read by the loss; leave it out\n"
        "batches/x='int32[1, 2]' is not array[B, 3]; give that shape and dtype"
    )


def test_an_array_without_rows_is_placed_whole():
    batch = {"x": np.zeros((8, 2)), "table": np.arange(3)}
    asked = checked(x=Entry(), table=Entry((3,)))
    with wrapping.wrap_batches([batch], CONFIG, asked) as batches:
        found = next(batches)
    assert found["table"].sharding.is_fully_replicated
    assert found["table"].tolist() == [0, 1, 2]
