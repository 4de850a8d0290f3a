"""Faults of the file system, each tried in a process of its own."""

import itertools
import pathlib
import resource
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np

from tests.checkpoint import states
from zjax.checkpoint import writer
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError


def lose_the_disk(directory, *kinds):
    """A disk that goes while a step is written: one error, and no thread that stays."""
    write = writer._write
    for kind in kinds:
        lose_in_one_way(directory.with_name(kind), kind, write)


def lose_in_one_way(directory, kind, write):
    rng = np.random.default_rng(0)
    values = {f"w{i}": rng.normal(size=(512, 512)).astype(np.float32) for i in range(8)}
    rows = states.make_rows(values)
    state = states.place(values, rows)
    store = Store(str(directory))
    store.save(1, state, rows, extra={})
    store.wait()

    def lose(partial, *args):
        LOSSES[kind](partial)
        write(partial, *args)

    writer._write = lose
    try:
        store.save(2, state, rows, extra={})
        store.wait()
    except CheckpointError as error:
        said = str(error)
    writer._write = write
    assert said.startswith("checkpoint.step=2 could not be written"), said
    assert not [t for t in threading.enumerate() if not t.daemon][1:]
    if kind == "gone":
        assert said.endswith(
            f": {directory} is gone; mount or make the directory again, and run again"
        ), said
    else:
        assert said.endswith("run again: step 1 is intact"), said
        states.assert_same(store.restore(rows)[0], values, rows)


def remount(options):
    def act(partial):
        mount = partial.parents[1]
        subprocess.run(["mount", "-o", f"remount,{options}", mount], check=True)

    return act


LOSSES = {
    "read-only": remount("ro"),
    "full": remount("size=12m"),
    "gone": lambda partial: shutil.rmtree(partial.parent),
    "emptied": shutil.rmtree,
}


def fill_the_disk(directory):
    """A full disk costs one checkpoint, whoever is the first to say so."""
    noise = np.random.default_rng(0).integers(0, 2**31, size=2**18, dtype=np.int32)
    values = {"w": noise}
    rows = states.make_rows(values)
    state = states.place(values, rows)
    store = Store(str(directory), keep_last=9)
    store.save(1, state, rows, extra={"at": 1})
    store.wait()
    tellers = (
        lambda step: store.wait(),
        lambda step: store.save(step + 1, state, rows, extra={}),
        lambda step: store.close(),
    )
    for step, tell in zip((2, 4, 6), tellers, strict=True):
        limit_files(2**16)
        try:
            store.save(step, state, rows, extra={})
            tell(step)
        except CheckpointError as error:
            message = str(error)
        finally:
            limit_files(resource.RLIM_INFINITY)
        last = max(step - 1, 1)
        start, _, end = message.partition(" (")
        assert start == f"checkpoint.step={step} could not be written to {directory}"
        assert "File too large" in message or "OUT_OF_RANGE" in message
        assert end.endswith(
            f"free disk space or repair the file system, and run again: step {last} is "
            "intact"
        ), end
        names = {path.name for path in directory.iterdir()}
        assert names == {str(number) for number in range(1, step, 2)}
        states.assert_same(store.restore(rows)[0], values, rows)
        store.save(step + 1, state, rows, extra={})
        store.wait()
    store.close()
    assert store.steps() == (1, 3, 5, 7)


def save_until_killed(directory):
    """Checks the newest checkpoint, then saves one step after another for ever."""
    values = {"w": np.zeros((7, 2**14), np.float32), "step": np.int32(0)}
    rows = states.make_rows(values)
    store = Store(str(directory))
    start = store.latest() or 0
    if start:
        state, extra = store.restore(rows)
        states.assert_same(state, numbered(values, start), rows)
        assert extra == {"at": start}
    print(f"restored {start}", flush=True)
    for step in itertools.count(start + 1):
        state = states.place(numbered(values, step), rows)
        store.save(step, state, rows, extra={"at": step})
        if step > start + 1:
            print(f"saved {step - 1}", flush=True)


def numbered(values, step):
    return jax.tree.map(lambda x: np.full_like(x, step), values)


def limit_files(size):
    """Lets no file grow beyond `size` bytes, as a full disk would."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    globals()[sys.argv[1]](pathlib.Path(sys.argv[2]), *sys.argv[3:])
    print("all as it should be")
