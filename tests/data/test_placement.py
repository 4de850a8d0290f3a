import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.data import placement
from zjax.errors import DataError
from zjax.typing import Entry


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


def test_arrays_of_a_batch_may_lie_differently():
    mesh = make_mesh()
    shardings = [
        (NamedSharding(mesh, P("data")), (8,)),
        (NamedSharding(mesh, P("sequence")), (8,)),
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


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            np.array(["a", "b"]),
            "batches[3]/x='<U1' is not a dtype of numbers (text, or rows of unequal "
            "length); turn it into token ids and pad them, or remove it",
        ),
        (
            np.array([1, 1 << 40]),
            "batches[3]/x=1099511627776 does not fit 32 bits; renumber it or remove it",
        ),
        (
            np.zeros((3, 2), np.float32),
            "batches[3]/x='float32[3, 2]' has 3 rows, but global_batch_size=2; make "
            "all batches that size and drop the last, partial one",
        ),
    ],
    ids=["text", "large-integer", "partial-batch"],
)
def test_arrays_that_cannot_be_placed(leaf, message):
    sharding = NamedSharding(make_mesh(), P())
    with pytest.raises(DataError) as error:
        placement.place_batch({"x": leaf}, lambda leaf: sharding, 2, "batches[3]")
    assert str(error.value) == message


def test_rows_of_files_with_other_ids_are_refused():
    """Fails if ids of a damaged file reach the devices, which have no row for them."""
    sharding = NamedSharding(make_mesh(), P())
    entries = {"tokens": Entry(("B", "L"), np.integer, num_ids=8)}
    checked = placement.BatchPlacement(lambda leaf: sharding, entries)
    rows = {"tokens": np.array([[1, 70_000]], np.int32)}
    with pytest.raises(DataError) as error:
        placement.place_rows(rows, np.arange(1), 1, checked)
    assert str(error.value) == "batch/tokens=70000 is no id of 8; use 0 to 7"
