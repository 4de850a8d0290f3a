"""The pool of pinned memory is limited to what a run needs, before JAX starts."""

import subprocess
import sys

import pytest

from zjax.config import load_config
from zjax.pinned import pinned_bytes
from zjax.processes.host import pinnable_bytes
from zjax.storage.move import BUFFER_BYTES

LARGE_HOST = """
import os
from zjax.processes import host
names = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "ZJAX_PINNED_LIMIT_GB")
if names[1] in os.environ:
    os.environ.update(dict.fromkeys(names, "1000"))
    host.host_memory_bytes = lambda: 1016 * 2**30
"""

PROGRAM = (
    LARGE_HOST
    + """
import sys
import jax
from jax._src import xla_bridge
from zjax.config import load_config
from zjax.pinned import pin_what_is_needed
config = load_config("configs/llama_8b_pinned_host.py", *sys.argv[2:])
pin_what_is_needed(config, int(sys.argv[1]))
pin_what_is_needed(config, int(sys.argv[1]))  # as in what a command starts
print(os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"])
assert not xla_bridge.backends_are_initialized()
"""
)


def limit(*arguments, **environment):
    given = {"HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "0,1"} | environment
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_pool_holds_the_arrays_and_little_more(num_processes):
    """Fails if JAX has to be asked, or may pin twice what is needed."""
    config = load_config("configs/llama_8b_pinned_host.py")
    arrays = pinned_bytes(config, 2) / num_processes
    assert pinned_bytes(config, 2) >= 12 * 8.0e9
    pool = limit(num_processes) * 2**30
    on_their_way = 2 * 5e9
    assert arrays + on_their_way < pool < 1.06 * arrays + on_their_way + 2 * 2**30


def test_gradients_that_wait_on_the_host_count():
    on_host = load_config(
        "configs/llama_8b_pinned_host.py", "zero.gradient_memory=pinned_host"
    )
    on_device = load_config(
        "configs/llama_8b_pinned_host.py", "zero.gradient_memory=device"
    )
    extra = pinned_bytes(on_host, 2) - pinned_bytes(on_device, 2)
    assert extra == pytest.approx(pinned_bytes(on_device, 2) / 3, rel=1e-3)
    extra = pinned_bytes(on_host, 32) - pinned_bytes(on_device, 32)
    assert extra == pytest.approx(pinned_bytes(on_device, 32) / 6, rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        ("zero.optimizer_memory=device", "zero.gradient_memory=device"),
        ("model.activation_memory=pinned_host",),
        ("model.num_heads=0",),
    ],
)
def test_other_runs_may_pin_the_hosts_share(settings):
    share = limit(1, *settings)
    assert share > 0
    assert share == limit(2, *settings)


def test_each_process_of_a_host_leaves_room_to_others():
    """Fails if eight processes of a large host have to do with the room of one."""
    large, gib = 512 * 2**30, 2**30
    left = [(large - pinnable_bytes(large, n)) // gib for n in (1, 2, 8)]
    assert left == [16, 32, 51]


def test_what_is_read_from_disks_has_room_beside_the_pool():
    """Fails if the pool may grow to all of the host where disks are read, too."""
    settings = ("zero.optimizer_memory=auto", "model.num_layers=400")
    whole = limit(1, *settings)
    beside_disks = limit(1, *settings, "zero.nvme_paths=('/nvme',)")
    assert (whole - beside_disks) * 2**30 == pytest.approx(2 * BUFFER_BYTES, abs=2**30)


def test_what_the_user_has_set_stays():
    assert limit(1, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="7") == 7


COMMAND = (
    LARGE_HOST
    + """
import jax
from zjax.main import run
def start():
    print(os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"])
    raise SystemExit
jax.default_backend = jax.devices = start
run()
"""
)


@pytest.mark.parametrize("name", ["train", "bench"])
def test_commands_limit_the_pool_before_devices_start(name, tmp_path):
    """Fails if JAX reads the limit before it is lowered."""
    path = "configs/llama_8b_pinned_host.py"
    words = [name, f"--config={path}", f"--config.directory={tmp_path}"]
    given = {"HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert int(done.stdout) == limit(1), done.stderr
