"""What is saved comes back, on any devices, and what is damaged says so."""

import errno
import os
import random
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.checkpoint import states
from tests.support.refusals import checkpoint_error
from zjax.checkpoint import arrays, steps, writer
from zjax.checkpoint.start import load_weights
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.weights.source import Entry

VALUES = states.make_values()


def save(directory, *steps, **options):
    store = Store(str(directory), **options)
    rows = states.make_rows(VALUES)
    for step, loss in steps:
        store.save(
            step, states.place(VALUES, rows), rows, extra={"at": step}, loss=loss
        )
    store.close()
    return store


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """One checkpoint without checksums, whose index each test overwrites."""
    directory = states.save(tmp_path_factory.mktemp("damaged"), VALUES, 1).directory
    (directory / "1" / "sums").unlink()
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint written by 8 devices under ZeRO-2; nobody changes it."""
    return states.save(tmp_path_factory.mktemp("saved"), VALUES, 3)


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"num_devices": 4},
        {"num_devices": 1},
        {"stage": 0},
        {"memory": "pinned_host"},
        {"replica": 2, "data": 2, "sequence": 2},
    ],
)
def test_restores_bit_for_bit(saved, target):
    rows = states.make_rows(VALUES, **target)
    state, extra = saved.restore(rows)
    states.assert_same(state, VALUES, rows)
    assert extra == {"at": 3}


@pytest.mark.parametrize(
    "source", [{"num_devices": 2}, {"stage": 0}, {"memory": "pinned_host"}]
)
def test_restores_what_others_wrote(tmp_path, source):
    store = states.save(tmp_path, VALUES, 1, **source)
    rows = states.make_rows(VALUES)
    states.assert_same(store.restore(rows)[0], VALUES, rows)


@pytest.mark.parametrize(
    ("losses", "options", "kept", "best"),
    [
        ([None] * 4, {"keep_best": 0}, (3, 4), None),
        ([2.0, 1.0, None, 3.0, 4.0], {}, (2, 4, 5), 2),
        ([1.0, float("nan"), 2.0, 3.0], {"keep_last": 1, "keep_best": 2}, (1, 3, 4), 1),
    ],
)
def test_keeps_the_last_and_the_best(tmp_path, losses, options, kept, best):
    half = len(losses) // 2
    numbered = [*enumerate(losses, start=1)]
    save(tmp_path, *numbered[:half], **options)
    store = save(tmp_path, *numbered[half:], **options)
    assert store.steps() == kept
    assert store.latest() == kept[-1]
    assert store.best() == best


def test_reads_only_the_weights(saved):
    rows = states.make_rows(VALUES["master"], 4, stage=3)
    params = load_weights(str(saved.directory), rows)
    states.assert_same(params, VALUES["master"], rows)


def test_casts_weights_on_request_only(saved):
    master = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x,
        VALUES["master"],
    )
    rows = states.make_rows(master)
    states.assert_same(load_weights(str(saved.directory), rows), master, rows)
    with pytest.raises(CheckpointError, match="is float32"):
        saved.restore(states.make_rows(VALUES | {"master": master}))


def test_saved_names_and_shapes_do_not_depend_on_the_mesh(saved, tmp_path):
    store = states.save(tmp_path, VALUES, 3, num_devices=1, stage=0)
    assert store.source().entries == saved.source().entries
    assert saved.source().entries["master/embed"] == Entry((7, 3), "float32")
    assert "opt_state/0/mu/blocks/0/kernel" in saved.source().entries


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    """Fails if the copy to the host is only begun when `save` returns."""
    values = {"w": np.arange(2**20, dtype=np.float32)}
    rows = states.make_rows(values)
    state = states.place(values, rows)
    overwrite = jax.jit(
        lambda x: jax.tree.map(lambda y: y * 0 - 1, x), donate_argnums=0
    )
    store = Store(str(tmp_path))
    store.save(1, state, rows, extra={})
    jax.block_until_ready(overwrite(state))
    store.close()
    states.assert_same(store.restore(rows)[0], values, rows)


def test_another_model_is_refused_with_what_differs(tmp_path):
    store = states.save(tmp_path, {"master": states.make_params()}, 3)
    other = states.make_params(width=8)
    other["embeding"] = other.pop("embed")
    with pytest.raises(CheckpointError) as error:
        store.restore(states.make_rows({"master": other}))
    place = tmp_path / "3"
    assert str(error.value) == (
        f"master/blocks/0/kernel='float32[16,8]' is float32[16,6] in {place}; make the "
        "two agree\n"
        f"master/embeding='float32[7,3]' is missing from {place}; did you mean "
        "master/embed?\n"
        f"master/embed='float32[7,3]' is in {place} but not in this model; remove "
        "it from the checkpoint, or add it to the model\n"
        f"checkpoint='{place}' differs from this model in 3 arrays, 3 of them shown; "
        "use the configuration that wrote it, or another checkpoint"
    )


def test_a_directory_without_checkpoints(tmp_path):
    store = Store(str(tmp_path / "none"))
    assert (store.steps(), store.latest(), store.best()) == ((), None, None)
    with checkpoint_error(
        f"checkpoint.directory='{tmp_path}/none' holds no complete checkpoint; give "
        "the directory that a run saved into, or start a new run"
    ):
        store.restore(states.make_rows(VALUES))
    assert not (tmp_path / "none").exists()


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    rows = states.make_rows(VALUES)
    stores = Store(str(tmp_path / "file")), Store(str(tmp_path / "file" / "below"))
    told = "is not a directory; name a directory, or one that can be created"
    with checkpoint_error(f"checkpoint.directory='{tmp_path}/file' {told}"):
        stores[0].latest()
    with checkpoint_error(f"checkpoint.directory='{tmp_path}/file/below' {told}"):
        stores[1].save(1, states.place(VALUES, rows), rows, extra={})


def test_the_disk_is_named_where_the_directory_cannot_be_made(tmp_path, monkeypatch):
    """Fails if a full disk is told to be a wrong path, as before the first save."""

    def refuse(path, mode=0o777, *, dir_fd=None):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    rows = states.make_rows(VALUES)
    with checkpoint_error(
        f"checkpoint.step=1 could not be written to {tmp_path}/a (OSError: [Errno 30] "
        f"Read-only file system: '{tmp_path}/a'); make the file system writable, and "
        "run again: there is none before it"
    ):
        Store(str(tmp_path / "a")).save(1, states.place(VALUES, rows), rows, extra={})


def test_other_steps_than_the_saved_one(saved):
    rows = states.make_rows(VALUES)
    with checkpoint_error(
        f"checkpoint.step=4 is not a checkpoint in {saved.directory}; use one of 3"
    ):
        saved.restore(rows, step=4)
    with checkpoint_error(
        f"checkpoint.step=3 is not after step 3 in {saved.directory}; resume from "
        "there, or start in another directory"
    ):
        saved.save(3, states.place(VALUES, rows), rows, extra={})


@pytest.mark.parametrize(
    ("index", "cause"),
    [
        ("{}", "KeyError: 'format'"),
        ('{"format": 3}', "ValueError: format 3, expected 1 or 2"),
        ('{"format": 1}', "KeyError: 'loss'"),
        ('{"format": 1, "loss": null, "arrays": {"w": {}}}', "KeyError: 'shape'"),
        ('{"format": 1, "loss": null, "arrays": {}}', "KeyError: 'extra'"),
    ],
    ids=["empty", "other-format", "format-only", "half-an-array", "no-extra"],
)
def test_the_only_step_damaged(damaged, index, cause):
    (damaged / "1" / "index" / "metadata").write_text(index)
    store = Store(str(damaged))
    for use in (store.best, store.extra, store.source):
        with checkpoint_error(
            f"checkpoint.step=1 cannot be read from {damaged} ({cause}); there "
            "is no step before it: start in another directory"
        ):
            use()


def test_the_cause_is_what_the_innermost_library_said(tmp_path):
    try:
        try:
            raise ValueError("DATA_LOSS: file is cut short\nand much more")
        except ValueError as error:
            raise Exception("See details: <bound method pybind11.spec>") from error
    except Exception as error:
        told = steps.damaged(tmp_path, 2, 1, error)
    assert str(told) == (
        f"checkpoint.step=2 cannot be read from {tmp_path} (ValueError: DATA_LOSS: "
        f"file is cut short); delete {tmp_path}/2 to go on from step 1"
    )


def test_a_full_disk(tmp_path):
    run_fault("fill_the_disk", tmp_path)


def test_a_directory_that_vanishes_while_a_step_is_written(tmp_path):
    """Fails if threads of Orbax keep the process from its end."""
    run_fault("lose_the_disk", tmp_path / "checkpoints", "gone", "emptied")


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_disk_that_fails_while_a_step_is_written(tmp_path, kind):
    """Fails if threads of Orbax keep the process from its end."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "zjax", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        run_fault("lose_the_disk", tmp_path / "checkpoints", kind)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def run_fault(fault, *args):
    """In a process of its own: what fails in Orbax leaves threads behind."""
    command = [sys.executable, "-m", "tests.checkpoint.faults", fault, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all as it should be\n")
    for word in ("Traceback", "ERROR", "Exception", "terminate"):
        assert word not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(20, marks=pytest.mark.slow)], ids=str
)
def test_a_kill_at_any_moment_loses_only_what_was_not_yet_saved(tmp_path, num_kills):
    """The child itself checks what it restores before it says so."""
    moment = random.Random(num_kills)
    command = [sys.executable, "-m", "tests.checkpoint.faults", "save_until_killed"]
    saved = 0
    for _ in range(num_kills):
        with subprocess.Popen(
            [*command, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            restored = child.stdout.readline()
            first = child.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=moment.uniform(0, 0.3))
            child.kill()
            lines = [first, *child.stdout]
            errors = child.stderr.read()
        assert restored.startswith("restored "), errors[-3000:]
        assert int(restored.split()[1]) >= saved
        saved = int(lines[-1].split()[1])
    assert Store(str(tmp_path)).latest() >= saved >= num_kills


def test_what_is_on_the_devices_is_written_while_others_go_on(tmp_path, monkeypatch):
    """Fails if `save` waits for Orbax, or for the copies."""
    values = states.make_values()
    rows = states.make_rows(values)
    store, started, go_on = Store(str(tmp_path)), threading.Event(), threading.Event()
    write = writer._write

    def slow(*args):
        started.set()
        assert go_on.wait(300)
        write(*args)

    monkeypatch.setattr(writer, "_write", slow)
    store.prepare(rows)
    state = states.place(values, rows)
    store.save(1, state, rows, extra={})
    assert started.wait(300)
    assert store.steps() == ()
    jax.tree.map(lambda x: x.delete(), state["master"])
    go_on.set()
    store.close()
    states.assert_same(store.restore(rows)[0], values, rows)


def test_copies_take_no_more_than_a_share_of_the_host(monkeypatch):
    """Fails if every replica is copied, or a small host is filled."""
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.device_put(np.zeros(64), NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(np.zeros(64), NamedSharding(mesh, PartitionSpec()))
    assert arrays.copy_to_host({"x": whole}) is not None
    monkeypatch.setattr(arrays, "_SMALL_BYTES", 0)
    assert arrays.copy_to_host({"x": whole}) is None
    copy = arrays.copy_to_host({"x": split})["x"]
    assert copy.sharding.memory_kind == "pinned_host"
    assert arrays.copy_to_host({"x": copy}) is None
    with monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        assert arrays.copy_to_host({"x": split}) is None
    monkeypatch.setattr(arrays, "host_memory_bytes", lambda: 500)
    assert arrays.copy_to_host({"x": split}) is None
