"""Faults of the file system, each tried in a process of its own."""

import itertools
import pathlib
import resource
import sys

import jax
import numpy as np

from tests.checkpoint import states
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError


def truncate_each_file(directory):
    """Cuts every file of the newest step in turn: right values, or a clear error."""
    values = states.make_values()
    rows = states.make_rows(values)
    store = Store(str(directory))
    store.save(1, states.place(values, rows), rows, extra={})
    store.save(2, states.place(values, rows), rows, extra={})
    store.close()
    num_noticed = 0
    for path in sorted(p for p in (directory / "2").rglob("*") if p.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            state, _ = Store(str(directory)).restore(rows)
        except CheckpointError as error:
            num_noticed += 1
            start, _, end = str(error).partition(" (")
            assert start == f"checkpoint.step=2 cannot be read from {directory}"
            assert end.endswith(f"delete {directory}/2 to go on from step 1"), end
        else:
            states.assert_same(state, values, rows)
        path.write_bytes(whole)
    assert num_noticed >= 5
    states.assert_same(store.restore(rows, step=1)[0], values, rows)


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
            f"make room or mend the file system, and run again: step {last} is whole"
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
    globals()[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("all as it should be")
