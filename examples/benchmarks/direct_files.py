"""Files that are written and read with O_DIRECT: what a disk gives to any program.

Rounds of 2 GiB in files of 16 MiB, 32 at a time, as `zjax bench --nvme` moves arrays.

python examples/benchmarks/direct_files.py runs/nvme
"""

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures

import timing

FILE_BYTES, NUM_FILES = 16 << 20, 128
NUM_THREADS = 32
WARM_UP_ROUNDS, ROUNDS = 3, 5


def write(path: str, buffer: mmap.mmap) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        return os.pwrite(file, buffer, 0)
    finally:
        os.close(file)


def read(path: str, buffer: mmap.mmap) -> int:
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.preadv(file, [buffer], 0)
    finally:
        os.close(file)


def measure(folder: str) -> dict[str, list[float]]:
    """Bytes per second of each timed round, all files together."""
    paths = [os.path.join(folder, str(number)) for number in range(NUM_FILES)]
    free = [mmap.mmap(-1, FILE_BYTES) for _ in range(NUM_THREADS)]
    for buffer in free:
        buffer[:] = os.urandom(FILE_BYTES)

    def rate(act: Callable[[str, mmap.mmap], int]) -> float:
        def one(path: str) -> None:
            buffer = free.pop()
            moved = act(path, buffer)
            free.append(buffer)
            assert moved == FILE_BYTES, f"{path}: {moved} of {FILE_BYTES} bytes"

        start = time.perf_counter()
        list(threads.map(one, paths))
        return NUM_FILES * FILE_BYTES / (time.perf_counter() - start)

    with futures.ThreadPoolExecutor(NUM_THREADS) as threads:
        rounds = [(rate(write), rate(read)) for _ in range(WARM_UP_ROUNDS + ROUNDS)]
    timed = zip(*rounds[WARM_UP_ROUNDS:], strict=True)
    return dict(zip(("write", "read"), map(list, timed), strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        rates = measure(folder)
    result = {way: timing.spread(each) for way, each in rates.items()}
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
