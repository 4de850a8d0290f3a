"""What rests on the host, and how much of it is on the devices at a time."""

import collections
import dataclasses
import functools
import weakref

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support.offload import (
    GPT,
    UNDER_BACKWARD,
    Perceptron,
    make_batch,
    make_config,
    memories,
    start,
    train,
)
from zjax.errors import PlanError
from zjax.offload import train as offload
from zjax.offload import units
from zjax.run import fit
from zjax.run.fit import offloaded_inputs
from zjax.sharding import memory
from zjax.sharding import plan as plans
from zjax.storage.array import DiskArray


@pytest.mark.parametrize("waits", [True, False])
def test_updates_wait_for_the_norm_only_where_they_read_it(waits):
    """Fails if an update without clipping waits for all gradients, or one with it
    does not."""
    changes = {} if waits else UNDER_BACKWARD
    run = start(make_config("pinned_host", **changes))
    assert run.step.executor.step.update.waits is waits


def test_state_rests_on_the_host_and_parameters_on_the_device():
    """Fails if `zero.offload` does nothing."""
    run = start(make_config("pinned_host"))
    state, _ = train(run, 1)
    for each in (start(make_config("pinned_host")).state, state):
        assert memories((each.master, each.opt_state)) == {"pinned_host"}
        assert memories(each.params) == {"device"}
    on_device = start(make_config("device")).state
    assert memories((on_device.master, on_device.opt_state)) == {"device"}
    assert on_device.params == ()


def watch(monkeypatch, stream, limit):
    """Records what is in flight whenever a load is brought up."""
    seen, bring = [], stream._copy_next
    monkeypatch.setattr(stream, "limit", int(limit))
    monkeypatch.setattr(
        stream, "_copy_next", lambda: (bring(), seen.append(stream.in_flight))
    )
    return seen


def test_groups_come_one_after_another(monkeypatch):
    """Fails if the whole state is on the devices at once, or groups are not cut."""
    monkeypatch.setattr(offload, "GROUP_BYTES", 256)
    config = make_config("pinned_host", model=dataclasses.replace(GPT, num_layers=6))
    run = start(config)
    step = run.step.executor.step
    moved = [r for r in step.rows.values() if r.memory == "pinned_host"]
    total = sum(row.device_bytes for row in moved)
    seen = watch(monkeypatch, step.stream, total // 4)
    train(run, 2)
    assert len(seen) == 2 * len(step.groups)
    assert len(step.groups) > 8
    assert 0 < max(seen) <= total / 4


def test_gradients_wait_on_the_host(monkeypatch):
    """Fails if `zero.offload.gradient_memory` does nothing: where the norm is waited
    for, gradients of groups that have not come up leave the devices, but for as much
    as the inputs of blocks leave room for."""
    on_device = make_config("pinned_host")
    on_host = make_config("pinned_host", zero={"gradient_memory": "pinned_host"})
    found = {}
    for config in (on_device, on_host):
        run = start(config)
        stream = run.step.executor.step.stream
        watch(monkeypatch, stream, 1)
        resting, add = collections.Counter(), stream.add

        def watched(name, arrays, rows, add=add, stream=stream, resting=resting):
            add(name, arrays, rows)
            load = [x for x in stream.waiting if x.name == name]
            for x in (y for each in load for y in each.arrays[-len(arrays) :]):
                size = x.addressable_shards[0].data.nbytes
                resting[x.sharding.memory_kind] += size

        monkeypatch.setattr(stream, "add", watched)
        _, metrics = train(run, 1)
        kept = run.step.executor.step.backward.residual_bytes
        found[config.zero.placement.gradient_memory] = resting, kept, metrics
    (host, kept, metrics), (device, _, expected) = found["pinned_host"], found["device"]
    assert host["device"] + host["pinned_host"] == device["device"]
    assert 0 < host["device"] <= kept
    assert host["pinned_host"] > 0
    assert metrics == expected


def test_equal_blocks_are_compiled_once():
    run = start(
        make_config("pinned_host", model=dataclasses.replace(GPT, num_layers=4))
    )
    update = run.step.executor.step.update
    blocks = {id(group.update.run) for group in update.groups[:4]}
    assert len(blocks) == 1


def test_blocks_are_stored_on_the_host():
    """Fails if `zero.offload.parameter_memory` does nothing."""
    config = make_config("pinned_host", zero={"parameter_memory": "pinned_host"})
    run = start(config)
    state, _ = train(run, 1)
    assert memories(state.params["blocks"]) == {"pinned_host"}
    assert memories(state.params["embedding"]) == {"device"}


def test_a_few_blocks_are_on_the_devices_whatever_the_depth(monkeypatch):
    """Fails if blocks stay after their use, or come up without bound."""
    monkeypatch.setattr(units, "AHEAD_BYTES", 0)
    model = dataclasses.replace(GPT, num_layers=8)
    config = make_config(
        "pinned_host", model=model, zero={"parameter_memory": "pinned_host"}
    )
    run = start(config)
    stream = run.step.executor.step.backward.units.stream
    block_bytes = sum(row.device_bytes for row in _moved(run.step.executor.step))
    seen = watch(monkeypatch, stream, stream.limit)
    state, _ = train(run, 1)
    assert max(seen) == 3 * block_bytes
    assert len(seen) == 2 * 8
    run.step.evaluate(state, make_batch(0))
    assert len(seen) == 3 * 8


def _moved(step):
    rows, *_ = step.backward.units.rows
    return [row for row in rows if row.memory == "pinned_host"]


def test_memories_that_hold_nothing_are_told_and_the_run_goes_on(monkeypatch, caplog):
    """A trial of a large run with a small model is the commonest first act."""
    config = make_config("pinned_host", zero={"parameter_memory": "pinned_host"})
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 1 << 18)
    plans._log_unmoved.cache_clear()
    run = start(config)
    for field in ("zero.offload", "zero.offload.parameter_memory"):
        text = f"{field}='pinned_host' moves nothing: no array has 262,144 bytes on a "
        text += "device, where all of them stay"
        assert caplog.messages.count(text) == 1
    state, _ = train(run, 1)
    assert memories((state.master, state.opt_state, state.params)) == {"device"}


def test_blocks_of_models_without_blocks_cannot_rest_on_the_host():
    settings = {
        "zero": {
            "min_shard_elements": 0,
            "offload": {"kind": "pinned_host", "parameter_memory": "pinned_host"},
        }
    }
    batch = {"x": np.ones((8, 24), np.float32)}
    with pytest.raises(PlanError) as error:
        zjax.initialize(
            Perceptron(),
            optax.adam(1e-2),
            lambda m, b, _: m(b["x"]).mean(),
            batch,
            settings,
        )
    assert str(error.value) == (
        "zero.offload.parameter_memory='pinned_host' moves nothing: no blocks of such "
        "a size "
        "run one by one; use device, or give a zjax.Model whose stack has them"
    )


def test_one_memory_serves_a_model_without_blocks(tmp_path, monkeypatch):
    """Fails if parameters that nobody asked to move are refused, or state stays."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    batch, losses = {"x": np.ones((8, 24), np.float32)}, {}
    disks = {"kind": "nvme", "nvme_paths": (str(tmp_path),)}
    for where, given in (("device", None), ("nvme", disks)):
        run = zjax.initialize(
            Perceptron(),
            optax.adam(1e-2),
            lambda m, b, _: (m(b["x"]) ** 2).mean(),
            batch,
            {"zero": {"min_shard_elements": 0, "offload": given}},
        )
        state, _ = run.step(run.state, batch)
        losses[where] = float(run.evaluate(state, batch)["loss"])
    assert DiskArray in {*map(type, jax.tree.leaves(state))}
    assert losses["nvme"] == pytest.approx(losses["device"], rel=1e-5)


def test_inputs_of_blocks_wait_elsewhere(monkeypatch, tmp_path):
    """Fails if `model.activation_memory` does nothing."""
    found = {}
    for kind in ("device", "pinned_host", "nvme"):
        model = dataclasses.replace(GPT, activation_memory=kind)
        disks = {"nvme_paths": (str(tmp_path),)} if kind == "nvme" else {}
        run = start(make_config("pinned_host", model=model, zero=disks))
        backward, away = run.step.executor.step.backward, []
        save = backward.save
        monkeypatch.setattr(
            backward,
            "save",
            lambda *x, f=save, a=away: a.append(f(*x)) or a[-1],
        )
        train(run, 1)
        rows = [row for load, _ in away for row in load.rows]
        found[kind] = {row.memory for row in rows}
        assert len(away) == GPT.num_layers
        told = offloaded_inputs(run.model, run.plan, run.config, make_batch(0))
        assert [*told] == [row for row in rows if row.memory != "device"]
    assert found == {kind: {kind} for kind in found}


check_host_memory = functools.partial(fit.check_host_memory, asked="pinned_host")


def test_bytes_by_memory():
    """Fails if what rests on the host counts as the devices', or the other way."""
    plan = start(make_config("pinned_host")).plan
    rows = jax.tree.leaves((plan.master, plan.opt_state, plan.compute))
    device, host = memory.stored_bytes(plan)[:2]
    assert device + host == sum(row.device_bytes for row in rows)
    assert device == sum(r.device_bytes for r in rows if r.memory == "device")
    fit.check_device_memory(plan, device)
    check_host_memory(plan, 8, 10**9, 8 * host)
    with pytest.raises(PlanError, match="of model state on devices of"):
        fit.check_device_memory(plan, device - 1)
    with pytest.raises(PlanError, match="may be pinned"):
        check_host_memory(plan, 8, 10**9, 8 * host - 1)


def test_state_that_does_not_fit_on_the_host_is_refused():
    plan = start(make_config("pinned_host")).plan
    with pytest.raises(PlanError) as error:
        check_host_memory(plan, 8, 1000, 900)
    assert str(error.value) == (
        "zero.offload='pinned_host' needs 0.0 GB on a host of 0.0 GB, of "
        "which 0.0 GB may be pinned; use nvme, more hosts, or a smaller model"
    )


def test_gradients_that_wait_on_the_host_need_room_there():
    plan = start(make_config("pinned_host")).plan
    sums, own = (
        memory.tree_bytes(memory.pending_gradients(plan, number)) for number in (4, 1)
    )
    assert sums == sum(row.device_bytes for row in jax.tree.leaves(plan.grads))
    assert sums == own  # in float32
    step = start(make_config("pinned_host", precision={"compute_dtype": "bfloat16"}))
    train = step.step.executor.step
    resting = sum(row.device_bytes for row in train.stored_grads)
    pending = memory.pending_gradients(step.plan, 1)
    assert memory.tree_bytes(pending) == resting == own // 2
    room = 8 * (memory.stored_bytes(plan).host + sums)
    check_host_memory(plan, 8, 10**9, room, sums)
    with pytest.raises(PlanError, match="may be pinned"):
        check_host_memory(plan, 8, 10**9, room, sums + 1)


@pytest.mark.parametrize(("remat", "each"), [("full", 1), ("elementwise", 11)])
def test_what_blocks_keep_is_given_up_as_the_backward_pass_goes(
    monkeypatch, remat, each
):
    """Fails if the inputs of all blocks, or what else they keep, stay until its end."""
    model = dataclasses.replace(GPT, remat=remat)
    run = start(make_config("pinned_host", model=model))
    segments = run.step.executor.step.backward
    kept, save, backward = [], segments.save, segments.programs.block_backward

    def watched(*parts):
        stored = save(*parts)
        kept.extend(weakref.ref(x) for x in stored[0].arrays)
        return stored

    alive = []

    def counted(*args):
        alive.append(sum(ref() is not None for ref in kept))
        return backward(*args)

    monkeypatch.setattr(segments, "save", watched)
    monkeypatch.setattr(segments.programs, "block_backward", counted)
    train(run, 1)
    assert alive == [2 * each, each]


def test_sums_of_gradients_rest_elsewhere(monkeypatch, tmp_path):
    """Fails if `zero.offload.gradient_memory` leaves sums on the devices between
    microbatches, or brings all of them up at once."""
    found = {}
    for kind in ("device", "pinned_host", "nvme"):
        disks = {"nvme_paths": (str(tmp_path),)} if kind == "nvme" else {}
        config = make_config(
            "pinned_host",
            1,
            num_microbatches=2,
            model=dataclasses.replace(GPT, num_layers=4),
            zero={"gradient_memory": kind} | disks,
        )
        run = start(config)
        backward = run.step.executor.step.backward
        kinds, begin = set(), backward.sums.stream.prefetch

        def watched(loads, begin=begin, kinds=kinds):
            loads = list(loads)
            arrays = [x for load in loads for x in load.arrays]
            kinds.update(
                "nvme" if isinstance(x, DiskArray) else x.sharding.memory_kind
                for x in arrays
                if x.nbytes >= 8 * plans.MIN_MOVED_BYTES
            )
            begin(loads)

        monkeypatch.setattr(backward.sums.stream, "prefetch", watched)
        total = sum(r.device_bytes for rows in backward.sums.rows for r in rows)
        seen = watch(monkeypatch, backward.sums.stream, total // 3)
        _, found[kind] = train(run, 1)
        assert kinds == {kind}
        assert max(seen) <= (0 if kind == "device" else total // 3)
    assert found["device"] == found["pinned_host"] == found["nvme"]
