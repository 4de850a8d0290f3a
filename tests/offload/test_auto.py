"""State that stays as near as this machine has room for it."""

import collections
import dataclasses
import functools
import socket
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.offload.test_train import assert_same_run
from tests.support import models, small_run
from tests.support.offload import (
    GPT,
    Perceptron,
    make_batch,
    make_config,
    smallest_host,
    start,
    train,
)
from zjax.errors import ConfigError, PlanError
from zjax.estimate import tables
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes import host
from zjax.run import fit
from zjax.run.plan_report import report_plan
from zjax.sharding import memory
from zjax.sharding import plan as plans
from zjax.sharding.memory import MemoryBytes
from zjax.sharding.mesh import make_mesh
from zjax.sharding.plan import DEVICE, HOST, NVME
from zjax.storage import transfers

DEEP = dataclasses.replace(GPT, num_layers=4)


def state_bytes(plan):
    """Of master weights and optimizer state, by memory; small arrays never move."""
    found = collections.Counter()
    for row in jax.tree.leaves((plan.master, plan.opt_state)):
        if row.device_bytes >= plans.MIN_MOVED_BYTES:
            found[row.memory] += row.device_bytes
    return found


@functools.cache
def sizes():
    """Bytes that a step takes of a device, and that its state takes of the host."""
    run = start(make_config("pinned_host", model=DEEP))
    peak = run.step.predict_peak(make_batch(0)).total
    # Parameters are there twice where a text is generated: at rest and cut.
    kept = memory.stored_bytes(run.plan).device
    needed = max(peak, kept + memory.tree_bytes(run.plan.compute))
    return needed, state_bytes(run.plan)[HOST]


@pytest.fixture
def machine(monkeypatch):
    """Gives devices and host room for parts of the state beside what a step takes."""

    def give(on_devices, on_host=None):
        needed, whole = sizes()
        capacity = (needed + on_devices * whole) / tables.DEVICE_SHARE
        monkeypatch.setattr(fit, "device_capacity_bytes", lambda mesh: capacity)
        if on_host is not None:
            pinned = fit.POOL_RATIO * on_host * whole
            monkeypatch.setattr(fit, "IN_FLIGHT_BYTES", 0)
            nothing = transfers.DiskStaging(0, 0)
            monkeypatch.setattr(fit, "staging_bytes", lambda *_: nothing)
            size = smallest_host(jax.device_count() * pinned)
            monkeypatch.setattr(fit, "host_memory_bytes", lambda: size)
        return whole

    return give


def test_room_for_all_weights_is_kept_where_they_come_up_at_once():
    """Fails if blocks that come up one by one to write a text cost the state room."""
    whole, by_block = (
        start(make_config("pinned_host", zero={"parameter_memory": kind})).plan
        for kind in ("device", "pinned_host")
    )
    size = memory.tree_bytes(whole.compute)
    kept = memory.stored_bytes(whole).device
    assert fit._bytes_to_generate(whole, 2.0 * size) == kept + size
    assert fit._bytes_to_generate(whole, 2.0 * size - 1) == 0
    assert fit._bytes_to_generate(by_block, 2.0 * size) == 0


def test_devices_keep_what_they_have_room_for(machine):
    """Fails if all of the state moves, or more of it stays than fits."""
    whole = machine(0.5)
    run = start(make_config("auto", model=DEEP))
    found = state_bytes(run.plan)
    assert 0.3 * whole < found[DEVICE] <= 0.5 * whole
    assert found[DEVICE] + found[HOST] == whole
    state = assert_same_run(run)
    rows = jax.tree.leaves((run.plan.master, run.plan.opt_state))
    kept = jax.tree.leaves((state.master, state.opt_state))
    assert [x.sharding.memory_kind for x in kept] == [row.memory for row in rows]
    first, *_, last = run.plan.master["blocks"]["mlp"]["up"]["kernel"]
    assert (first.memory, last.memory) == (DEVICE, HOST)


def test_models_beside_a_policy_keep_their_room(machine):
    """Fails if state fills the memory that a critic or a reference will take."""
    whole, config = machine(1.0), make_config("auto", model=DEEP)
    model, mesh = make_model(config), make_mesh(config.mesh)
    tx, taken = make_optimizer(config, model), 0.5 * whole / tables.DEVICE_SHARE
    beside = MemoryBytes(int(taken) + 1, 0, 0)
    found = state_bytes(fit.fit_plan(config, mesh, model, tx, beside=beside))
    assert 0.3 * whole < found[DEVICE] <= 0.5 * whole


def test_the_rest_goes_to_disks(machine, tmp_path):
    whole = machine(0.3, on_host=0.4)
    config = make_config("auto", model=DEEP, zero={"nvme_paths": (str(tmp_path),)})
    run = start(config)
    found = state_bytes(run.plan)
    assert 0.1 * whole < found[DEVICE] <= 0.3 * whole
    assert 0.2 * whole < found[HOST] <= 0.4 * whole
    assert found[NVME] == whole - found[DEVICE] - found[HOST]
    assert_same_run(run)


def test_blocks_leave_buffers_of_disks_their_room(monkeypatch, tmp_path):
    """Fails if what rests on the host may take what is on its way to or from disks."""
    zero = {"parameter_memory": "pinned_host", "nvme_paths": (str(tmp_path),)}
    config = make_config("nvme", model=DEEP, zero=zero)
    plan = start(config).plan
    _, blocks, disks = memory.stored_bytes(plan)
    passing = 2 * disks + memory.stored_bytes(plan).offloaded
    size = smallest_host(jax.device_count() * (fit.POOL_RATIO * blocks + passing))
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: size)
    start(config)
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: int(0.99 * size))
    with pytest.raises(PlanError, match="may be pinned"):
        start(config)


def test_without_disks_a_full_host_refuses(machine):
    machine(0.3, on_host=0.4)
    with pytest.raises(
        PlanError,
        match=r"^zero.offload='auto' needs .* may be pinned; name disks in "
        r"zero.offload.nvme_paths, use more hosts, or a smaller model$",
    ):
        start(make_config("auto", model=DEEP))


def test_a_host_without_room_for_what_passes_through_it(monkeypatch, tmp_path):
    """Fails if state on disks is said to need nothing of the host; `zjax plan` says so
    after its tables, where a run is refused."""
    zero = {"nvme_paths": (str(tmp_path),)}
    config = dataclasses.replace(
        make_config("nvme", zero=zero), directory=str(tmp_path)
    )
    start(config)
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: 1000)
    with pytest.raises(PlanError) as error:
        start(config)
    assert str(error.value) == (
        "zero.offload='nvme' lacks 0.0 GB for what is on its way to and from "
        "8 devices on a host of 0.0 GB; use fewer devices on a host, or a host "
        "with more memory"
    )
    assert f"this machine has no room for it: {error.value}\n" in report_plan(config)


def test_a_model_of_your_own_is_asked_with_its_batch(monkeypatch):
    batch = {"x": np.ones((16, 4), np.float32), "y": np.ones((16, 1), np.float32)}

    def loss_fn(view, batch, key):
        return jnp.mean((view(batch["x"]) - batch["y"]) ** 2)

    def run(kind):
        config = {
            "zero": {"offload": kind, "min_shard_elements": 0},
            "precision": {"compute_dtype": "float32"},
        }
        return zjax.initialize(Perceptron(), optax.adam(0.1), loss_fn, batch, config)

    moved = run("pinned_host")
    whole = state_bytes(moved.plan)
    peak = moved.step.predict_peak(batch).total

    def plan_with(room):
        capacity = (peak + room) / tables.DEVICE_SHARE
        monkeypatch.setattr(fit, "device_capacity_bytes", lambda mesh: capacity)
        return state_bytes(run("auto").plan)

    assert plan_with(0) == whole
    assert plan_with(whole[HOST] + 1) == {DEVICE: whole[HOST]}


def test_what_a_step_takes_must_be_known(monkeypatch, tmp_path):
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(
            tmp_path,
            "zero.offload=auto",
            "model.remat=full",
            model=models.make_mlp(),
            batches=[],
        )
    assert str(error.value) == (
        "zero.offload='auto' cannot be planned for batches that are not known "
        "yet; use 'pinned_host' or 'nvme', or zjax.initialize"
    )
    monkeypatch.setattr("zjax.run.step.Step.predict_peak", lambda self, batch: None)
    with pytest.raises(PlanError) as error:
        start(make_config("auto"))
    assert str(error.value) == (
        "zero.offload='auto' does not know what a step takes of these "
        "devices; use 'pinned_host' or 'nvme'"
    )


def test_a_step_that_does_not_fit_is_refused(machine, monkeypatch):
    machine(0)
    whole = fit.device_capacity_bytes(None)
    monkeypatch.setattr(fit, "device_capacity_bytes", lambda mesh: whole / 10)
    with pytest.raises(PlanError) as error:
        model = dataclasses.replace(DEEP, remat="dots")
        start(make_config("auto", model=model))
    assert str(error.value) == (
        "zero.offload='auto' leaves a step that takes 0.0 GB, most of it "
        "stored state, on devices with 0.0 GB free; use model.remat=full, a smaller "
        "microbatch_size, more devices, or the host for zero.offload.parameter_memory, "
        "zero.offload.gradient_memory and model.activation_memory"
    )


def test_a_model_too_small_to_move_stays_on_the_devices(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1 << 18)
    run = start(make_config("auto", zero={"gradient_memory": "pinned_host"}))
    rows = jax.tree.leaves((run.plan.master, run.plan.opt_state))
    assert {row.memory for row in rows} == {DEVICE}
    train(run, 1)


def test_processes_of_one_host_share_it(monkeypatch):
    """Fails if each process takes the whole host for its own devices."""
    names = [zlib.crc32(socket.gethostname().encode())] * 2 + [7]
    told = np.array([[name, 2] for name in names])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(host.multihost_utils, "process_allgather", lambda x: told)
    assert host.local_processes(2) == (4, 2)
