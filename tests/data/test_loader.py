import collections
import dataclasses
import json
import multiprocessing
import pathlib
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import sampling
from tests.support.refusals import config_error, data_error
from zjax.config import load_config
from zjax.data import loader, packing, prepare, source
from zjax.data.metric_index import index_path, write_index
from zjax.errors import DataError
from zjax.settings import schema

ROOT = pathlib.Path(__file__).parents[2]


def make_shardings(num_data=4):
    mesh = jax.make_mesh(
        (num_data, 8 // num_data), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2
    )
    return lambda leaf: NamedSharding(mesh, P("data", "sequence"))


@pytest.fixture(autouse=True)
def token_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{number:0{number}}"}) for number in range(1, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare.prepare(["a.jsonl"], "tokens", validation_fraction=0.25)


def make_config(**data):
    data = {"source": "tokens", "path": "tokens", "length": 16} | data
    return schema.Config(seed=3, global_batch_size=8, data=schema.Data(**data))


def as_lists(batches):
    return [{name: array.tolist() for name, array in b.items()} for b in batches]


def expected_batches(config, steps):
    rows = source.open_rows(config, "train")
    order = [sampling.batch(step, len(rows), 3, 8) for step in steps]
    return as_lists(rows.read(np.array(indices)) for indices in order)


def take(batches, num_batches):
    return as_lists(next(batches) for _ in range(num_batches))


@pytest.mark.parametrize("kind", ["blocks", "documents"])
@pytest.mark.parametrize("num_data", [2, 8])
def test_batches_are_the_rows_of_the_oracle_on_any_mesh(kind, num_data):
    config = make_config(packing=kind)
    with loader.make_loader(config, make_shardings(num_data)) as batches:
        assert take(batches, 12) == expected_batches(config, range(12))


@pytest.mark.parametrize("prefetch_batches", [0, 1, 5])
def test_a_batch_lies_where_it_is_told(prefetch_batches):
    shardings = make_shardings()
    config = make_config(prefetch_batches=prefetch_batches)
    with loader.make_loader(config, shardings) as batches:
        batch = next(batches)
    assert {array.sharding for array in batch.values()} == {shardings(None)}
    dtypes = {name: array.dtype.name for name, array in batch.items()}
    assert dtypes == {"tokens": "int32", "targets": "int32", "weights": "float32"}


@pytest.mark.parametrize("num_read", [0, 1, 7])
def test_a_loader_resumes_at_the_sample_where_another_stopped(num_read):
    """Fails if the position counts batches read ahead instead of batches handed out."""
    config = make_config()
    with loader.make_loader(config, make_shardings()) as first:
        take(first, num_read)
        state = json.loads(json.dumps(first.state()))
    assert state["step"] == num_read
    with loader.make_loader(config, make_shardings(2)) as second:
        take(second, 3)
        second.set_state(state)
        expected = expected_batches(config, range(num_read, num_read + 4))
        assert take(second, 4) == expected


def test_another_order_cannot_be_resumed():
    config = make_config()
    with loader.make_loader(config, make_shardings()) as first:
        state = first.state()
    changed = dataclasses.replace(config, seed=4, global_batch_size=16)
    second = loader.make_loader(changed, make_shardings())
    with data_error(
        "global_batch_size=16 was 8 in the saved run, so its samples are not these; "
        "restore that setting or that data, or start a new run\n"
        "seed=4 was 3 in the saved run, so its samples are not these; restore that "
        "setting or that data, or start a new run"
    ):
        second.set_state(state)


LOST = (
    "so its samples are not these; restore that setting or that data, or start a new "
    "run"
)


def with_order(name):
    """A run whose batches are cut, ordered or bucketed."""
    pacing = {"start": 8, "multiple": 8}
    settings = {
        "none": {},
        "warm-up": {"sequence_warmup": {"kind": "truncate", "pacing": pacing}},
        "curriculum": {
            "curriculum": {"metrics": ({"index": "voc.index", "difficulty": "value"},)}
        },
        "buckets": {"buckets": {"kind": "cut", "shortest": 8}},
    }
    return load_config(make_config(), settings[name])


@pytest.fixture
def voc(token_directory):
    config = make_config()
    rows = source.open_rows(config, "train")
    digest, path = source.digest_samples(config.data, rows), index_path("", "voc")
    write_index(path, "voc", np.arange(float(len(rows))), digest)


@pytest.mark.parametrize(
    ("saved", "other", "field", "before", "after"),
    [
        ("none", "warm-up", "sequence_warmup", None, "truncate"),
        ("none", "curriculum", "curriculum.metrics", [], ["voc"]),
        ("none", "buckets", "buckets", None, "cut"),
    ],
)
@pytest.mark.parametrize("switched_on", [True, False], ids=["on", "off"])
def test_another_order_is_refused_by_the_name_of_what_is_switched(
    voc, saved, other, field, before, after, switched_on
):
    """Fails if it is taken, or named by settings that a run without it lacks."""
    names, values = [saved, other], [before, after]
    if not switched_on:
        names.reverse()
        values.reverse()
    one, two = (loader.make_loader(with_order(x), make_shardings(1)) for x in names)
    with pytest.raises(DataError) as error:
        two.set_state(json.loads(json.dumps(one.state())))
    lines = [x for x in str(error.value).splitlines() if not x.startswith("num_rows")]
    lines = [line for line in lines if not line.startswith("data.digest")]
    assert lines == [
        f"{field}={values[1]!r} was {values[0]!r} in the saved run, {LOST}"
    ]


OLD_NAMES = {
    "sequence_warmup": "sequence_warmup.form",
    "buckets": "buckets.form",
    "buckets.order.num_cycles": "buckets.num_cycles",
    "buckets.order.weights": "buckets.weights",
}
"""Names of the last release, whose positions say 'none' in place of None."""


@pytest.mark.parametrize("name", ["none", "warm-up", "buckets"])
def test_a_position_under_old_names_is_taken(name, caplog):
    """Fails if a checkpoint of the last release does not continue."""
    batches = loader.make_loader(with_order(name), make_shardings(1))
    state = batches.state() | {"step": 3}
    old = {OLD_NAMES.get(key, key): value for key, value in state.items()}
    old |= {key: "none" for key in old if key.endswith(".form") and old[key] is None}
    assert old != state
    batches.set_state(json.loads(json.dumps(old)))
    assert batches.state() == state
    assert "does not say" not in caplog.text


@pytest.mark.parametrize("name", ["num_rows", "data.digest", "data.tokenizer"])
def test_each_word_of_the_position_is_compared(name):
    """Fails if one of them is left out where all else is the same."""
    batches = loader.make_loader(make_config(), make_shardings())
    state = batches.state()
    with pytest.raises(DataError, match=f"^{name}=.* was 'other' in the saved run"):
        batches.set_state(state | {name: "other"})
    assert name in state


@pytest.mark.parametrize("step", [None, "3", 2.0, True, -1, 2**31])
def test_a_position_of_another_type_is_refused(step):
    batches = loader.make_loader(make_config(), make_shardings(1))
    with data_error(
        f"data/step={step!r} is not a data position; start from another checkpoint"
    ):
        batches.set_state(batches.state() | {"step": step})


def test_a_position_that_says_less_is_taken_and_told(caplog):
    batches = loader.make_loader(make_config(), make_shardings())
    state = batches.state()
    del state["data.digest"]
    batches.set_state(state | {"step": 3})
    assert batches.state()["step"] == 3
    assert caplog.messages == ["the checkpoint does not say its data.digest"]


def test_a_finite_loader_ends():
    with loader.make_loader(
        make_config(), make_shardings(), start_step=4, num_batches=3
    ) as batches:
        assert len(list(batches)) == 3
        assert batches.state()["step"] == 7


def test_batch_size_that_is_not_derived():
    config = dataclasses.replace(make_config(), global_batch_size=0)
    with config_error(
        "global_batch_size=0 is not a number of rows until it is derived; give the "
        "config that `zjax.initialize` returns, or set it"
    ):
        loader.make_loader(config, make_shardings())


class TornRows(packing.BlockRows):
    """Rows on a disk that fails at the first read after the loader was made."""

    num_reads = 0

    def read(self, indices, /):
        self.num_reads += 1
        if self.num_reads > 1:
            raise OSError(5, "Input/output error")
        return super().read(indices)


def test_an_error_of_the_reading_thread_arrives_with_its_traceback():
    rows = TornRows(np.zeros(100, np.uint16), 16)
    batches = loader.sample_rows(
        rows, schema.Data(), make_shardings(), seed=3, batch_size=8
    )
    with pytest.raises(OSError, match="Input/output error") as error:
        next(batches)
    assert "read" in [entry.name for entry in error.traceback]
    assert batches.state()["step"] == 0


def check_worker_processes(config, batches):
    """Fails if processes read other rows, or one that the system killed ends a run
    with an error of grain."""
    assert take(batches, 5) == expected_batches(config, range(5, 10))
    for worker in multiprocessing.active_children():
        worker.kill()
    with data_error(
        "data.num_workers=2 lost a worker process (signal 9, SIGKILL, possibly out of "
        "memory); use fewer or give them more memory, and run again"
    ):
        collections.deque(batches, maxlen=0)


@pytest.mark.parametrize("num_workers", [0, 2], ids=["threads", "processes"])
def test_closing_stops_what_was_started(num_workers):
    config = make_config(num_workers=num_workers, packing="documents")
    batches = loader.make_loader(config, make_shardings(), start_step=5)
    if num_workers:
        check_worker_processes(config, batches)
    next(batches)
    started = [thread for thread in threading.enumerate() if "grain-" in thread.name]
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in started)


PROGRAM = """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from zjax.settings import schema
    from zjax.data import loader

    if __name__ == "__main__":
        mesh = Mesh(np.array(jax.devices()), ("data",))
        left_open = []
        for num_workers in (0, 1):
            data = schema.Data(source="synthetic", length=8, num_workers=num_workers)
            batches = loader.make_loader(
                schema.Config(data=data),
                lambda leaf: NamedSharding(mesh, PartitionSpec("data")),
            )
            left_open.append(batches)
            print(next(batches)["tokens"].shape)
"""


def test_a_program_outside_absl_ends_quietly_without_closing(tmp_path):
    """Of threads and of a process. Fails if absl's flags stay unparsed, or threads
    outlive the interpreter."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("(32, 8)\n" * 2, "", 0)
