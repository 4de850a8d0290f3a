"""Batches that are given: how they are wrapped, checked and placed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import sampling
from tests.support.refusals import data_error
from tests.support.squares import Columns
from zjax.data import batches as wrapping
from zjax.data import evaluation, placement, sums
from zjax.data.entries import check_batch, check_placed_values, entries_of
from zjax.models.build import make_model
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


def test_columns_without_rows_or_of_unequal_rows_are_refused():
    with data_error("batches='Columns' has no rows; give one with rows"):
        wrapping.wrap_batches(Columns({"x": []}), CONFIG, shardings)
    dataset = Columns({"x": [[1], [2, 3]]})
    with data_error(
        "batches/x='object' is not a dtype of numbers (text, or rows of unequal "
        "length); turn it into token ids and pad them, or remove it"
    ):
        next(wrapping.wrap_batches(dataset, CONFIG, shardings))


def wrap_evaluation(batches, config, shardings):
    return evaluation.find_evaluation(config, shardings, evaluation_batches=batches)


@pytest.mark.parametrize(
    ("wrap", "field"),
    [(wrapping.wrap_batches, "batches"), (wrap_evaluation, "evaluation_batches")],
)
def test_rows_of_other_fields_are_refused(wrap, field):
    with data_error(
        f"{field}[1]={{'y': (1,)}} is not of the shape {{'x': (1,)}} of row 0; give "
        "all rows the same fields and lengths, such as by padding"
    ):
        wrap([{"x": [1]}, {"y": [1]}], CONFIG, shardings)


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
    with data_error(
        "batches='list_iterator' is an iterator that has been drawn from; give an "
        "iterable that starts anew, such as a list"
    ):
        next(batches)


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
        with data_error(
            "batches[2]/x='float32[5, 2]' has 5 rows, but global_batch_size=8; make "
            "all batches that size and drop the last, partial one"
        ):
            next(batches)


def checked(**entries):
    return placement.BatchPlacement(shardings, entries)


def test_columns_are_checked_before_the_first_batch():
    dataset = Columns({"x": [[0, 1]] * 20, "extra": [0] * 20})
    asked = checked(x=Entry(("B", 3)), y=Entry(("B",), np.dtype("int32")))
    with data_error(
        "batches/y=None is missing; give int32[B]\n"
        "batches/extra='int32[1]' is not read by the loss; leave it out\n"
        "batches/x='int32[1, 2]' is not array[B, 3]; give that shape and dtype"
    ):
        wrapping.wrap_batches(dataset, CONFIG, asked)


def test_an_array_without_rows_is_placed_whole():
    batch = {"x": np.zeros((8, 2)), "table": np.arange(3)}
    asked = checked(x=Entry(), table=Entry((3,)))
    with wrapping.wrap_batches([batch], CONFIG, asked) as batches:
        found = next(batches)
    assert found["table"].sharding.is_fully_replicated
    assert found["table"].tolist() == [0, 1, 2]


def make_mesh():
    return jax.make_mesh((4, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)


SPECS = {
    "rows-and-columns": P("data", "sequence"),
    "rows-over-all": P(("data", "sequence"), None),
    "rows-over-the-minor-axis": P("sequence", None),
    "columns-only": P(None, "data"),
    "everywhere": P(None, None),
}


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_process_finds_all_its_devices_need_in_the_rows_it_read(
    spec, num_processes
):
    """Fails if rows are shared out by process number instead of by sharding."""
    whole = np.arange(16 * 8).reshape(16, 8)
    sharding = NamedSharding(make_mesh(), spec)
    indices = sharding.devices_indices_map(whole.shape)
    for devices in np.split(np.array(jax.devices()), num_processes):
        rows = placement.needed_rows([(sharding, whole.shape)], devices.tolist())
        local = whole[rows]
        for device in devices.tolist():
            found = placement.device_rows(local, rows, 16, indices[device])
            assert found.tolist() == whole[indices[device]].tolist()


def test_a_process_reads_no_row_it_does_not_hold():
    sharding = NamedSharding(make_mesh(), SPECS["rows-and-columns"])
    devices = jax.devices()[4:6]
    rows = placement.needed_rows([(sharding, (16, 8))], devices)
    assert rows.tolist() == [8, 9, 10, 11]
    shardings = [
        (NamedSharding(make_mesh(), P(axis)), (8,)) for axis in ("data", "sequence")
    ]
    rows = placement.needed_rows(shardings, jax.devices()[2:3])
    assert rows.tolist() == [0, 1, 2, 3]


def test_rows_become_global_arrays():
    whole = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    sharding = NamedSharding(make_mesh(), P("data", "sequence"))
    batch = placement.place_rows(
        {"tokens": whole}, np.arange(16), 16, lambda leaf: sharding
    )
    assert batch["tokens"].sharding == sharding
    assert np.asarray(batch["tokens"]).tolist() == whole.tolist()


def test_rows_of_files_with_other_ids_are_refused():
    """Fails if ids of a damaged file reach the devices, which have no row for them."""
    sharding = NamedSharding(make_mesh(), P())
    entries = {"tokens": Entry(("B", "L"), np.integer, num_ids=8)}
    checked = placement.BatchPlacement(lambda leaf: sharding, entries)
    rows = {"tokens": np.array([[1, 70_000]], np.int32)}
    with data_error("batch/tokens=70000 is no id of 8; use 0 to 7"):
        placement.place_rows(rows, np.arange(1), 1, checked)


EXAMPLE = {
    "image": np.zeros((8, 4), np.float32),
    "label": np.zeros(8, np.int64),
    "scale": np.float32(1),
    "table": np.zeros((3, 2), np.float32),
}
IDS = {
    "tokens": Entry(("B", "L"), np.integer, num_ids=10),
    "targets": Entry(("B", "L"), np.integer, num_ids=10, may_be_ignored=True),
    "weights": Entry(("B", "L"), is_optional=True),
}


def test_what_an_example_asks():
    assert entries_of(EXAMPLE, replicated=["table"]) == {
        "image": Entry(("B", 4), np.dtype("float32")),
        "label": Entry(("B",), np.dtype("int32")),
        "scale": Entry((), np.dtype("float32")),
        "table": Entry((3, 2), np.dtype("float32")),
    }
    batch = {"x": jax.ShapeDtypeStruct((8,), jnp.float32), "of": {"a": jnp.ones(3)}}
    found = entries_of(batch, replicated=["of"])
    assert not found["of/a"].has_rows and found["x"].has_rows


def test_other_numbers_of_rows_than_most_are_refused():
    with data_error(
        "replicated='tables' is not in the batch; use any of image, label, scale, "
        "table\n"
        "batch/table='float32[3, 2]' does not have the 8 rows of the others; give it "
        "as many, or name it in replicated=['table'], which gives it to devices and "
        "microbatches whole"
    ):
        entries_of(EXAMPLE, replicated=["tables"])


def test_all_that_is_wrong_is_told_at_once():
    batch = {
        "image": np.zeros((8, 3), np.float32),
        "label": np.array([1 << 40] * 8),
        "scale": "1.0",
        "text": np.array(["a"] * 8),
        "mask": np.ones(8, bool),
        "large": np.array([1e300] * 8),
        "list": [1, 2],
        "rows": np.array([[1], [2, 3]], object),
    }
    asked = entries_of(EXAMPLE, replicated=["table"])
    with data_error(
        "batches[3]/label=1099511627776 does not fit 32 bits; renumber it or remove "
        "it\n"
        "batches[3]/large=1e+300 does not fit float32; renumber it or remove it\n"
        "batches[3]/list='list' is not an array; use numpy.asarray\n"
        "batches[3]/rows='object' is not a dtype of numbers (text, or rows of unequal "
        "length); turn it into token ids and pad them, or remove it\n"
        "batches[3]/scale='str' is not an array; use numpy.asarray\n"
        "batches[3]/text='<U1' is not a dtype of numbers (text, or rows of unequal "
        "length); turn it into token ids and pad them, or remove it\n"
        "batches[3]/table=None is missing; give float32[3, 2]\n"
        "batches[3]/mask='bool[8]' is not read by the loss; leave it out\n"
        "batches[3]/image='float32[8, 3]' is not float32[B, 4]; give that shape and "
        "dtype"
    ):
        check_batch(batch, asked, name="batches[3]")


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_sizes_must_agree(kind):
    batch = {
        "tokens": kind(np.zeros((8, 4), np.int32)),
        "targets": kind(np.zeros((8, 3), np.int32)),
        "weights": kind(np.zeros((7, 4), np.float32)),
    }
    with data_error(
        "batch/tokens='int32[8, 4]' does not have the 3 columns of batch/targets; give "
        "it as many\n"
        "batch/weights='float32[7, 4]' does not have the 8 rows of batch/targets; give "
        "it as many\n"
        "batch/weights='float32[7, 4]' does not have the 3 columns of batch/targets; "
        "give it as many"
    ):
        check_batch(batch, IDS)


def test_ids_are_checked_on_the_host():
    batch = {"tokens": np.full((2, 2), -100), "targets": np.array([[-1, 0], [10, 3]])}
    with data_error(
        "batch/targets=-1 is no id of 10; use 0 to 9, or -100 for ignored tokens\n"
        "batch/tokens=-100 is no id of 10; use 0 to 9"
    ):
        check_batch(batch, IDS)


def test_what_is_asked_for_passes_in_the_dtypes_of_jax():
    batch = {
        "tokens": np.array([[0, 9]], np.int64),
        "targets": np.array([[-100, 9]], np.int8),
        "weights": np.array([[1000.5, np.inf]]),
    }
    found = check_batch(batch, IDS)
    assert {name: str(x.dtype) for name, x in found.items()} == {
        "tokens": "int32",
        "targets": "int8",
        "weights": "float32",
    }
    assert found["weights"].tolist() == [[1000.5, np.inf]]


def test_negative_weights_are_refused_on_the_host_and_on_devices():
    """Fails if a loss may be negative: -89 with one token of weight -1."""
    entries = {"weights": Entry(("B", "L"), may_be_negative=False)}
    for weights, check in (
        (np.array([[1.0, -0.5]]), check_batch),
        (jnp.array([[1.0, -0.5]]), check_placed_values),
    ):
        with data_error("batch/weights=-0.5 is negative; use 0 or more"):
            check({"weights": weights}, entries)
    check_batch({"weights": np.array([[0.0, 2.0]])}, entries)
    built_in = make_model(schema.Config()).entries
    names = {name for name, entry in built_in.items() if not entry.may_be_negative}
    assert names == {"weights", "segment_ids", "lengths"}


def test_ids_on_devices_are_checked_where_asked():
    batch = {"tokens": jnp.array([[9, 10]]), "targets": jnp.array([[-100, 9]])}
    check_batch(batch, IDS)
    with data_error("batch/tokens=10 is no id of 10; use 0 to 9"):
        check_placed_values(batch, IDS)
    check_placed_values(batch | {"tokens": jnp.array([[9, 0]])}, IDS)


def test_a_batch_without_rows_is_refused():
    """Fails if a mean over no rows, NaN, counts as a step that was skipped."""
    batch = {"x": np.ones((0, 2), np.float32)}
    for entries in ({}, entries_of({"x": np.ones((8, 2), np.float32)})):
        with data_error("batch/x='float32[0, 2]' has no rows; leave such batches out"):
            check_batch(batch, entries)
