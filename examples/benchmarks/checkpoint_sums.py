"""What checksums cost a checkpoint: bytes per second with and without, in turn.

python examples/benchmarks/checkpoint_sums.py [DIRECTORY] [--gigabytes=1.5] [--turns=5]

Random float32, one array of 64 MiB after another, saved and restored, with files in the
page cache, where checksums cost most. Bytes are those of the arrays. On a machine that
has other work, look at the seconds of its processors, and at the best of the turns.
"""

import argparse
import contextlib
import pathlib
import tempfile
import time
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zjax.checkpoint import sums, verify
from zjax.checkpoint.store import Store
from zjax.sharding.placement import ArrayPlan

ROWS, COLUMNS = 4096, 4096
NO_SUM = sums.Sum(0, 0, 0)


def make_state(num_bytes):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sharding, shape = NamedSharding(mesh, PartitionSpec()), (ROWS, COLUMNS)
    rng = np.random.default_rng(0)
    names = [f"w{i}" for i in range(max(1, num_bytes // (4 * ROWS * COLUMNS)))]
    state = {
        name: jax.device_put(rng.normal(size=shape).astype(np.float32), sharding)
        for name in names
    }
    rows = {
        name: ArrayPlan(name, shape, np.dtype(np.float32), sharding, sharding)
        for name in names
    }
    return state, rows


@contextlib.contextmanager
def without_checksums():
    """Files are still synced and looked for; none is read for its checksum."""
    size = lambda root, name: NO_SUM._replace(size=(root / name).stat().st_size)  # noqa: E731
    with (
        mock.patch.object(sums, "_sum_of", size),
        mock.patch.object(verify, "check_step", lambda *_, **__: None),
        mock.patch.object(verify, "check_step", lambda *_, **__: None),
        mock.patch.object(verify, "check_file_of", lambda *_, **__: None),
    ):
        yield


def measure(directory, state, rows):
    """Seconds, and those of the CPUs, to save, to restore and to compare checksums."""
    store = Store(directory)
    clocks = [(time.perf_counter(), time.process_time())]

    def note():
        clocks.append((time.perf_counter(), time.process_time()))

    store.save(1, state, rows, extra={})
    store.close()
    note()
    restored, _ = Store(directory).restore(rows)
    jax.block_until_ready(restored)
    note()
    verify.check_step(pathlib.Path(directory) / "1", shared=False)
    note()
    return np.diff(np.asarray(clocks), axis=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", default=None)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    state, rows = make_state(int(given.gigabytes * 1e9))
    megabytes = sum(x.nbytes for x in state.values()) / 1e6
    seconds = {"with": [], "without": []}
    for turn in range(given.turns + 1):
        for kind, taken in seconds.items():
            has_sums = kind == "with"
            scope = contextlib.nullcontext() if has_sums else without_checksums()
            with scope, tempfile.TemporaryDirectory(dir=given.directory) as parent:
                found = measure(str(pathlib.Path(parent) / "steps"), state, rows)
            if turn:  # the first compiles and warms
                taken.append(found)
    print(f"{megabytes:.0f} MB, {given.turns} turns")
    for kind, taken in seconds.items():
        for number, what in enumerate(("save", "restore", "checksums alone")):
            if kind == "without" and number == 2:
                continue
            wall, cpu = np.asarray(taken)[:, number].T
            rates = (
                f"{megabytes / np.median(wall):.0f} (best {megabytes / wall.min():.0f})"
            )
            print(f"{what}, {kind}: {rates} MB/s, CPU seconds {np.median(cpu):.2f}")


if __name__ == "__main__":
    main()
