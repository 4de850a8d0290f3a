"""Kernels of a device by the time that they take, from a trace of `jax.profiler`."""

import collections
import pathlib
import tempfile

import jax
from rich.console import Console
from rich.table import Table

NUM_KERNELS = 15


class Trace:
    """Traces what runs inside; afterwards has the kernels of the first device."""

    def __enter__(self):
        self.kernels = {}
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name)
        return self

    def __exit__(self, *_):
        jax.profiler.stop_trace()
        with self._folder as folder:
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            data = jax.profiler.ProfileData.from_file(str(path))
        self.kernels = kernel_times(data)


def kernel_times(data):
    """Seconds and calls of each kernel on the first device, the longest first."""
    seconds, calls = collections.Counter(), collections.Counter()
    # Other lines of a device repeat what its streams do.
    for plane in data.planes:
        if plane.name != "/device:GPU:0":
            continue
        streams = (line for line in plane.lines if line.name.startswith("Stream"))
        for event in (event for line in streams for event in line.events):
            seconds[event.name] += event.duration_ns / 1e9
            calls[event.name] += 1
    return {name: (spent, calls[name]) for name, spent in seconds.most_common()}


def show(times, per, unit):
    """Prints the kernels that take the most time, for one of `per` things."""
    total = sum(spent for spent, _ in times.values()) or 1.0
    table = Table(f"kernel of {len(times)}", f"calls/{unit}", f"us/{unit}", "share")
    for name, (spent, calls) in list(times.items())[:NUM_KERNELS]:
        cells = f"{calls / per:.1f}", f"{1e6 * spent / per:.1f}", f"{spent / total:.1%}"
        table.add_row(name[:90], *cells)
    console = Console(width=140, stderr=True)
    console.print(table)
    console.print(f"all kernels: {1e6 * total / per:.1f} us/{unit}")
