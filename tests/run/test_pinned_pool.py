"""Memory of the host and of devices: limits before a run, words after it ran out."""

import os
import subprocess
import sys

import jax
import optax
import pytest

import zjax.run.step
from tests.support import models, small_run
from zjax.config import load_config
from zjax.errors import PlanError
from zjax.processes import host
from zjax.processes.cluster import Cluster
from zjax.processes.host import pinnable_bytes
from zjax.run.fit import explain_out_of_memory
from zjax.run.pinned_pool import limit_pinned_pool, pinned_bytes
from zjax.sharding import plan as plans
from zjax.sharding.mesh import make_mesh
from zjax.sharding.plan import make_plan
from zjax.storage.transfers import IN_FLIGHT_BYTES, READ_AHEAD_BYTES

CONFIG = "configs/llama_8b_pinned_host.py"
NAMES = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "ZJAX_PINNED_LIMIT_GB")


@pytest.fixture
def limit(monkeypatch):
    """The limit, in GiB, of a run on two GPUs of a host with 1016 GiB."""

    def find(num_processes, *settings, gpus="0,1", owns_visible=False, users=""):
        monkeypatch.setattr(host, "host_memory_bytes", lambda: 1016 * 2**30)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.setenv(NAMES[1], "1000")
        monkeypatch.setenv(NAMES[0], users or "1000")
        cluster = Cluster(
            "slurm", num_processes, num_local=num_processes, owns_visible=owns_visible
        )
        config = load_config(CONFIG, *settings)
        limit_pinned_pool(config, cluster)
        limit_pinned_pool(config, cluster)  # as in what a command starts
        return int(os.environ[NAMES[0]])

    return find


@pytest.mark.parametrize(
    ("num_processes", "shown"),
    [(1, {}), (2, {}), (2, {"gpus": "1", "owns_visible": True})],
)
def test_pool_holds_the_arrays_and_little_more(limit, num_processes, shown):
    """Fails if JAX may pin twice what is needed."""
    config = load_config(CONFIG)
    arrays = pinned_bytes(config, 2) * 2 / num_processes
    assert pinned_bytes(config, 2) * 2 >= 14 * 8.0e9
    pool = limit(num_processes, **shown) * 2**30
    on_their_way = 2 / num_processes * 5e9
    assert arrays + on_their_way < pool < 1.06 * arrays + on_their_way + 2 * 2**30


def test_gradients_that_wait_on_the_host_count():
    """Beside ten bytes a parameter, four of a sum, or two of a single microbatch."""
    on_host = load_config(CONFIG, "zero.offload.gradient_memory=pinned_host")
    on_device = load_config(CONFIG, "zero.offload.gradient_memory=device")
    extra = pinned_bytes(on_host, 2) - pinned_bytes(on_device, 2)
    assert extra == pytest.approx(pinned_bytes(on_device, 2) * 4 / 10, rel=1e-3)
    extra = pinned_bytes(on_host, 32) - pinned_bytes(on_device, 32)
    assert extra == pytest.approx(pinned_bytes(on_device, 32) * 2 / 10, rel=2e-3)


def test_inputs_of_blocks_that_wait_on_the_host_count():
    """Fails if what enters the blocks is left out: one row in bfloat16."""
    away = load_config(CONFIG, "model.activation_memory=pinned_host")
    here = load_config(CONFIG, "model.activation_memory=device")
    row = away.data.length * away.model.embed_size * 2
    extra = pinned_bytes(away, 2) - pinned_bytes(here, 2)
    assert extra == away.microbatch_size * row * away.model.num_layers


@pytest.mark.parametrize(
    "settings",
    [("zero.offload=None",), ("mesh.data=7",)],
)
def test_other_runs_may_pin_their_share_of_the_host(limit, settings):
    """Fails if each of several processes limits its pool as if it were alone."""
    assert limit(1, *settings) == int(0.95 * 1016 - 12)
    assert limit(2, *settings) == (0.95 * 1016 - 2 * 12) // 2


@pytest.mark.parametrize(
    ("setting", "times"),
    [
        ("zero.stage=0", 2),
        ("mesh.replica=2", 2),
        ("zero.offload.parameter_memory=pinned_host", 16 / 14),
    ],
)
def test_what_each_device_keeps_for_itself_counts(setting, times):
    """Fails if an array that every device has is counted once for all of them, or
    parameters that rest split are counted whole."""
    found = pinned_bytes(load_config(CONFIG, setting), 2)
    assert found == pytest.approx(times * pinned_bytes(load_config(CONFIG), 2), 0.02)


def test_state_on_disks_leaves_the_host_to_what_passes_through_it(limit):
    """Fails if the pool may take the memory that is read into from disks; copies for a
    checkpoint of the 16 GB of parameters on each device have room in it."""
    settings = ("zero.offload=nvme", "zero.offload.nvme_paths=('/nvme',)")
    pool = limit(1, *settings, "zero.offload.gradient_memory=device") * 2**30
    assert 2 * 16e9 < pool < 2 * (16.1e9 * 1.05 + 2 * IN_FLIGHT_BYTES) + 2 * 2**30


def test_state_of_any_size_leaves_the_others_their_share(limit):
    settings = ("zero.offload=auto", "model.mlp_size=1433600")
    assert limit(2, *settings) <= (0.95 * 1016 - 2 * 12) // 2


def test_each_process_of_a_host_leaves_room_to_others():
    """Fails if eight processes of a large host have to do with the room of one."""
    large, gib = 512 * 2**30, 2**30
    left = [(large - pinnable_bytes(large, n)) // gib for n in (1, 2, 8)]
    assert left == [37, 49, 61]


def test_what_is_read_from_disks_has_room_beside_the_pool(limit):
    """Fails if the pool may grow to all of the host where disks are read, too."""
    settings = ("zero.offload=auto", "model.mlp_size=1433600")
    whole = limit(1, *settings)
    beside_disks = limit(1, *settings, "zero.offload.nvme_paths=('/nvme',)")
    buffers = 2 * (READ_AHEAD_BYTES + IN_FLIGHT_BYTES)  # what goes down is in the pool
    assert (whole - beside_disks) * 2**30 == pytest.approx(buffers, abs=2**30)


def test_a_limit_of_the_user_stays_and_is_for_what_is_pinned(limit, monkeypatch):
    """Fails if it is charged with memory that is read into from disks, or if a state
    fills the host, and JAX then refuses to pin all of it."""
    gib = 2**30
    assert limit(1, users="7") == 7
    rooms = [pinnable_bytes(20 * gib, 1, beside * gib) // gib for beside in (0, 9, 15)]
    assert rooms == [7, 7, 2]
    found = [pinnable_bytes(size * gib, 2) / gib for size in (10, 1016)]
    assert found == pytest.approx([8.8, 14])
    for users, limited in (("7.5", 7.5), ("", 0.95 * 1016 - 12)):
        monkeypatch.setenv(NAMES[0], users)
        assert pinnable_bytes(1016 * gib) == pytest.approx(limited * gib)


COMMAND = """
import os
from zjax.processes import host
names = ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "ZJAX_PINNED_LIMIT_GB")
if names[1] in os.environ:
    os.environ.update(dict.fromkeys(names, "1000"))
    host.host_memory_bytes = lambda: 1016 * 2**30
import jax
from jax._src import xla_bridge
from zjax.cli.main import run
def start():
    assert not xla_bridge.backends_are_initialized()
    print(os.environ[names[0]])
    raise SystemExit
jax.default_backend = jax.devices = start
run()
"""


@pytest.mark.parametrize("name", ["train", "bench"])
def test_commands_limit_the_pool_before_devices_start(limit, name, tmp_path):
    """Fails if JAX reads the limit before it is lowered, or has to be asked for it."""
    words = [name, f"--config={CONFIG}", f"--config.directory={tmp_path}"]
    given = {"HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert int(done.stdout) == limit(1), done.stderr


ASKED = "Out of memory while trying to allocate 12.00GiB"


@pytest.fixture
def exhausted(monkeypatch):
    def call(*_):
        error = f"RESOURCE_EXHAUSTED: {ASKED}.\nBufferAssignment OOM Debugging"
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(zjax.run.step.Step, "__call__", call)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            (),
            "set microbatch_size=1 (the batch stays, in more microbatches) or "
            "model.remat=full or zero.stage=3 or zero.offload=pinned_host, or ",
        ),
        (
            (
                "global_batch_size=8",
                "model.remat=full",
                "zero.stage=3",
                "zero.offload=pinned_host",
                "model.embed_size=512",
                "model.mlp_size=2048",
            ),
            "set zero.offload.parameter_memory=pinned_host, or ",
        ),
        (
            (
                "global_batch_size=8",
                "num_microbatches=4",
                "mesh.pipeline=4",
                "model.num_layers=4",
            ),
            "set model.remat=full or zero.stage=3, or ",
        ),
    ],
)
def test_remedies_are_what_is_not_done_yet(tmp_path, exhausted, settings, remedy):
    trainer = small_run.make_trainer(tmp_path, *settings)
    with pytest.raises(PlanError) as error:
        trainer.fit()
    size = trainer.config.microbatch_size
    assert str(error.value) == (
        f"microbatch_size={size} takes more memory than devices have ({ASKED}); "
        f"{remedy}use more devices, or a smaller model"
    )
    trainer.close()


def told(error, memory="pinned_host"):
    """What is raised of a model of one's own on one device."""
    config = load_config({"zero.offload": memory}, global_batch_size=1)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    plan = make_plan(config, mesh, models.make_mlp(), optax.sgd(0.1, momentum=0.9))
    with (
        pytest.raises((jax.errors.JaxRuntimeError, PlanError)) as found,
        explain_out_of_memory(config, plan, user_model=True),
    ):
        raise jax.errors.JaxRuntimeError(error)
    return found.value


@pytest.mark.parametrize(
    ("memory", "remedy"),
    [
        (None, "set zero.offload=pinned_host, or use more devices"),
        ("pinned_host", "use more devices"),
    ],
)
def test_a_model_of_your_own_reads_no_settings_of_models(monkeypatch, memory, remedy):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1)
    error = told(f"RESOURCE_EXHAUSTED: {ASKED}.", memory)
    assert str(error) == (
        f"microbatch_size=1 takes more memory than devices have ({ASKED}); "
        f"{remedy}, or a smaller model"
    )


def test_other_errors_of_devices_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1)
    error = told("INTERNAL: lost")
    assert (type(error), str(error)) == (jax.errors.JaxRuntimeError, "INTERNAL: lost")
