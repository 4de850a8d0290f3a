"""What is asked of batches, and that all that is wrong with one is told at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.data.entries import check_batch, check_placed_values, entries_of
from zjax.errors import DataError
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.typing import Entry

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


def test_shapes_and_dicts_can_be_named():
    batch = {"x": jax.ShapeDtypeStruct((8,), jnp.float32), "of": {"a": jnp.ones(3)}}
    found = entries_of(batch, replicated=["of"])
    assert not found["of/a"].has_rows and found["x"].has_rows


def test_other_numbers_of_rows_than_most_are_refused():
    with pytest.raises(DataError) as error:
        entries_of(EXAMPLE, replicated=["tables"])
    assert str(error.value) == (
        "replicated='tables' is not in the batch; use any of image, label, scale, "
        "table\n"
        "batch/table='float32[3, 2]' does not have the 8 rows of the others; give it "
        "as many, or name it in replicated=['table'], which gives it to devices and "
        "microbatches whole"
    )


def test_all_that_is_wrong_is_told_at_once():
    batch = {
        "image": np.zeros((8, 3), np.float32),
        "label": np.array([1 << 40] * 8),
        "scale": "1.0",
        "text": np.array(["a"] * 8),
        "mask": np.ones(8, bool),
        "list": [1, 2],
        "rows": np.array([[1], [2, 3]], object),
    }
    asked = entries_of(EXAMPLE, replicated=["table"])
    with pytest.raises(DataError) as error:
        check_batch(batch, asked, name="batches[3]")
    assert str(error.value) == (
        "batches[3]/label=1099511627776 does not fit 32 bits; renumber it or remove "
        "it\n"
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
    )


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_sizes_must_agree(kind):
    batch = {
        "tokens": kind(np.zeros((8, 4), np.int32)),
        "targets": kind(np.zeros((8, 3), np.int32)),
        "weights": kind(np.zeros((7, 4), np.float32)),
    }
    with pytest.raises(DataError) as error:
        check_batch(batch, IDS)
    assert str(error.value) == (
        "batch/tokens='int32[8, 4]' does not have the 3 columns of batch/targets; give "
        "it as many\n"
        "batch/weights='float32[7, 4]' does not have the 8 rows of batch/targets; give "
        "it as many\n"
        "batch/weights='float32[7, 4]' does not have the 3 columns of batch/targets; "
        "give it as many"
    )


def test_ids_are_checked_on_the_host():
    batch = {"tokens": np.full((2, 2), -100), "targets": np.array([[-1, 0], [10, 3]])}
    with pytest.raises(DataError) as error:
        check_batch(batch, IDS)
    assert str(error.value) == (
        "batch/targets=-1 is no id of 10; use 0 to 9, or -100 for ignored tokens\n"
        "batch/tokens=-100 is no id of 10; use 0 to 9"
    )


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


def test_floats_that_do_not_fit_are_refused():
    with pytest.raises(DataError) as error:
        check_batch({"x": np.array([1e300])}, {})
    assert str(error.value) == (
        "batch/x=1e+300 does not fit float32; renumber it or remove it"
    )


def test_negative_weights_are_refused_on_the_host_and_on_devices():
    """Fails if a loss may be negative: -89 with one token of weight -1."""
    entries = {"weights": Entry(("B", "L"), may_be_negative=False)}
    for weights, check in (
        (np.array([[1.0, -0.5]]), check_batch),
        (jnp.array([[1.0, -0.5]]), check_placed_values),
    ):
        with pytest.raises(DataError) as error:
            check({"weights": weights}, entries)
        assert str(error.value) == "batch/weights=-0.5 is negative; use 0 or more"
    check_batch({"weights": np.array([[0.0, 2.0]])}, entries)
    built_in = make_model(schema.Config()).entries
    names = {name for name, entry in built_in.items() if not entry.may_be_negative}
    assert names == {"weights", "segment_ids", "lengths"}


def test_ids_on_devices_are_checked_where_asked():
    batch = {"tokens": jnp.array([[9, 10]]), "targets": jnp.array([[-100, 9]])}
    check_batch(batch, IDS)
    with pytest.raises(DataError) as error:
        check_placed_values(batch, IDS)
    assert str(error.value) == "batch/tokens=10 is no id of 10; use 0 to 9"
    check_placed_values(batch | {"tokens": jnp.array([[9, 0]])}, IDS)


def test_a_batch_without_rows_is_refused():
    """Fails if a mean over no rows, NaN, counts as a step that was skipped."""
    batch = {"x": np.ones((0, 2), np.float32)}
    for entries in ({}, entries_of({"x": np.ones((8, 2), np.float32)})):
        with pytest.raises(DataError) as error:
            check_batch(batch, entries)
        assert str(error.value) == (
            "batch/x='float32[0, 2]' has no rows; leave such batches out"
        )
