"""Two processes are one run: the same numbers, the same checkpoints, one obituary."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.checkpoint import states
from tests.processes import worker
from tests.support import programs, small_llama, squares
from tests.support.cases import some_by_hand
from zjax import processes
from zjax.checkpoint.store import Store
from zjax.generation.engine import Engine
from zjax.settings import schema

HOST = socket.gethostname()


def launcher(task, directory, num_processes=2, **environ):
    command = [sys.executable, "-m", "tests.processes.worker", task, str(directory)]
    program = (
        "import sys\n"
        "from zjax import processes\n"
        f"sys.exit(processes.supervise({command!r}, {num_processes}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
    )


@contextlib.contextmanager
def ended(*launchers):
    """Their output and last words, once all have ended; none outlives the test."""
    try:
        yield [programs.finish(launched) for launched in launchers]
    finally:
        for launched in launchers:
            launched.kill()
            launched.communicate()


def wait_until_ready(launched):
    limit = threading.Timer(programs.HANG_SECONDS, launched.kill)
    limit.start()
    try:
        for line in launched.stdout:
            if line == "[process 1] ready\n":
                return
    finally:
        limit.cancel()
    launched.kill()
    raise AssertionError(launched.communicate()[1][-3000:])


def pid_of(directory, process_id):
    record = directory / "processes" / f"{process_id}.member.json"
    return json.loads(record.read_text())["pid"]


def assert_all_gone(directory):
    for process_id in range(2):
        assert not pathlib.Path(f"/proc/{pid_of(directory, process_id)}").exists()


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """The folders of tasks that two processes did, by name."""
    folder = tmp_path_factory.mktemp("lived")
    for task in worker.TOGETHER:
        (folder / task.__name__).mkdir()
    states.save(folder / "work" / "given", states.make_values(), 1)
    begin_file(folder / "generate")
    launched = launcher("live", folder)
    with ended(launched) as [(printed, errors)]:
        assert launched.returncode == 0, errors[-3000:]
    (folder / "printed.txt").write_text(printed)
    return folder


def begin_file(folder):
    """Writes a file of texts, and another with the first of them."""
    small_llama.write(folder / "llama", max_length=64)
    (folder / "prompts.txt").write_text("Why?\nSo?\na\n")
    whole, begun = folder / "alone.jsonl", folder / "both.jsonl"
    worker.type_texts(folder, f"--output={whole}")
    begun.write_bytes(whole.read_bytes().splitlines(keepends=True)[0])
    shutil.copy(f"{whole}.origin.json", f"{begun}.origin.json")


def results_of_both(folder):
    return (json.loads((folder / f"results{i}.json").read_text()) for i in range(2))


def test_two_processes_equal_one(lived):
    values = states.make_values()
    rows = states.make_rows(values)
    results = json.loads((lived / "work" / "results.json").read_text())
    total = worker.compute(rows["step"].stored.mesh)
    np.testing.assert_array_equal(results.pop("total"), total)
    assert results.pop("table") == (
        "processes, by zjax launch:\n"
        f"process  {'host':<{len(HOST)}}  devices\n"
        f"      0  {HOST:<4}  4 x cpu (0-3)\n"
        f"      1  {HOST:<4}  4 x cpu (4-7)"
    )
    assert results.pop("drawn") == worker.draw_batches(rows["step"].stored.mesh)
    assert results.pop("evaluated") == squares.MEAN
    assert results == {"saved": True, "given": True, "stopped": 1}
    assert [p.name for p in (lived / "work" / "run" / "checkpoints").iterdir()] == ["1"]
    state, extra = Store(str(lived / "work" / "checkpoints")).restore(rows)
    states.assert_same(state, values, rows)
    assert extra == {"by": 2}


@pytest.mark.slow
def test_a_pipeline_through_two_processes_is_that_of_one(tmp_path):
    """Fails if each process gives its own part of a batch that both hold whole."""
    launched = launcher("pipeline", tmp_path)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode == 0, errors[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found == pytest.approx(worker.measure_pipeline(), rel=1e-6)


@pytest.mark.slow
def test_two_processes_keep_their_state_elsewhere_as_one_does(tmp_path):
    """Fails if a process moves what another has, or not all that it has itself."""
    launched = launcher("rest", tmp_path)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode == 0, errors[-3000:]
    alone = worker.train_offloaded("device", tmp_path)
    for losses in json.loads((tmp_path / "results.json").read_text()):
        np.testing.assert_allclose(losses, alone, rtol=1e-6)


def test_two_processes_train_on_rounded_matrices_as_one_does(lived):
    """Fails if a process rounds the inputs that it has by a scale of its own."""
    first, second = results_of_both(lived / "round_weights")
    assert first == second
    np.testing.assert_allclose(first, worker.train_rounded(worker.ROUNDED), rtol=1e-6)
    assert abs(first[0] / worker.train_rounded()[0] - 1) > 1e-3


def test_two_processes_learn_from_texts_as_one_does(lived, tmp_path, monkeypatch):
    """Fails if processes score, group, place or save a rollout each for itself."""
    first, second = results_of_both(lived / "learn")
    problem = "rewards='tests.support.rl_rewards:missing'"
    assert first.pop("failed").startswith(f"ConfigError: {problem}")
    assert second.pop("failed").startswith(f"ConfigError: process 0: {problem}")
    assert first == second
    monkeypatch.setattr(Engine, "compile", worker.compile_when_run)
    _, rows = worker.learn_from_texts(tmp_path / "alone")
    np.testing.assert_allclose(first["rows"], rows, rtol=1e-4, atol=1e-6)
    run = lived / "learn" / "run"
    files = {str(x.relative_to(run)) for x in run.rglob("*")}
    assert {"checkpoints/1", "checkpoints/2", "checkpoints/3"} <= files
    assert {x for x in files if x.startswith("rollouts/")} == {
        "rollouts/1.npz",
        "rollouts/3.npz",
    }


def test_two_processes_write_the_texts_of_one(lived):
    """Fails if passes differ by process, or if a process takes requests alone."""
    first, second = results_of_both(lived / "write")
    assert first == second
    with worker.start_writing() as generator:
        assert first.pop("texts") == worker.write_texts(generator)
    remedy = "; make all processes the same"
    assert first == {
        "prompts": "ProcessError: prompts='e8346f36068a6c61' on process 1 is "
        f"'d45e839466e232d0' on process 0{remedy}",
        "settings": f"ProcessError: seed=1 on process 1 is 0 on process 0{remedy}",
        "stream": "ConfigError: processes=2 would read requests in orders of their "
        "own; use generate or generate_each, or start one process",
        "serve": first["stream"],
    }


def test_two_processes_write_one_file(lived):
    """Fails if each process writes the file, or prints the texts, for itself."""
    alone, both = (lived / "generate" / f"{x}.jsonl" for x in ("alone", "both"))
    assert both.read_bytes() == alone.read_bytes()
    printed = (lived / "printed.txt").read_text()
    assert printed.count('{"prompt": "Why?", "text": ') == 1


def test_a_save_that_one_process_cannot_do_ends_in_all_with_its_name(lived):
    """Fails if the others wait at a barrier, or end at another step."""
    folder = lived / "fail_to_save"
    first, second = results_of_both(folder)
    beyond = f"{folder}/file/checkpoints"
    unheld = (
        f"directory='{beyond}' cannot be used (Not a directory); "
        "name a writable directory"
    )
    assert first["held"] == f"ProcessError: {unheld}"
    assert second["held"] == f"ProcessError: process 0: {unheld}"
    assert first["begun"] == (
        f"CheckpointError: checkpoint.directory='{beyond}' is not a directory; name a "
        "directory, or one that can be created"
    )
    assert second["begun"].startswith(
        f"CheckpointError: checkpoint.step=0 could not be written to {beyond} (process "
        "0: NotADirectoryError: [Errno 20] Not a directory: "
    )
    for results, cause in (
        (first, "process 1: OSError: [Errno 28] No space left on device"),
        (second, "OSError: [Errno 28] No space left on device"),
    ):
        assert results["written"] == (
            "CheckpointError: checkpoint.step=2 could not be written to "
            f"{folder}/run/checkpoints ({cause}); free disk space or repair the file "
            "system, and run again: there is none before it"
        )
        assert results["step"] == first["step"]


@pytest.mark.slow
def test_a_process_may_be_late_once_groups_of_devices_are_connected(tmp_path):
    """Fails if a step that compiles for long in one process ends the others."""
    launched = launcher("part_for_long", tmp_path)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode == 0, errors[-3000:]


def test_processes_that_differ_are_told_so_before_they_work(tmp_path):
    """Fails if one trains along with another seed."""
    launched = launcher("differ", tmp_path)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode, errors[-3000:]
    told = (
        "zjax.errors.ProcessError: seed=1 on process 1 is 0 on process 0; make all "
        "processes the same"
    )
    for process_id in range(2):
        assert f"[process {process_id}] {told}" in errors.splitlines()


OBITUARY = (
    "process=1 on host {host} (pid {pid}) ended ({reason}); the last checkpoint is "
    "step 40 in {directory}/checkpoints: {mend}run the same command again to resume"
)


@pytest.mark.parametrize(
    ("task", "reason", "code"),
    [
        # a process that is killed has a parent of its own below
        ("refuse", "DataError: data.path='x' is gone; look", 134),
        pytest.param(
            *("fail", "ValueError: no more tokens", 134), marks=pytest.mark.slow
        ),
        pytest.param(
            *("freeze", "stopped sending heartbeats", 134), marks=pytest.mark.slow
        ),
    ],
)
def test_the_death_of_one_ends_all_and_is_explained(tmp_path, task, reason, code):
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    launched = launcher(task, tmp_path)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode == code, errors[-3000:]
    assert errors.splitlines()[-1] == OBITUARY.format(
        host=HOST,
        pid=pid_of(tmp_path, 1),
        reason=reason,
        directory=tmp_path,
        mend="fix the cause and " if "Error" in reason else "",
    )
    assert_all_gone(tmp_path)


def test_each_host_names_the_process_that_died_on_another(tmp_path):
    """Two parents with a child each, as a scheduler starts them on two hosts."""
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    with socket.socket(socket.AF_INET6) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
        addresses = {
            "ZJAX_COORDINATOR": f"localhost:{held.getsockname()[1]}",
            "ZJAX_NUM_PROCESSES": "2",
        }
        parents = [
            launcher("kill", tmp_path, 0, ZJAX_PROCESS_ID=str(i), **addresses)
            for i in range(2)
        ]
        with ended(*parents) as results:
            first, second = (parent.returncode for parent in parents)
            assert first > 128 and second == 137
    obituary = OBITUARY.format(
        host=HOST,
        pid=pid_of(tmp_path, 1),
        reason="signal 9, SIGKILL, possibly out of memory",
        directory=tmp_path,
        mend="",
    )
    assert [errors.splitlines()[-1] for _, errors in results] == [obituary] * 2
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    "number", some_by_hand((signal.SIGTERM, signal.SIGINT), {signal.SIGINT})
)
def test_a_signal_to_the_parent_stops_the_children_in_their_own_way(tmp_path, number):
    launched = launcher("leave", tmp_path)
    wait_until_ready(launched)
    launched.send_signal(number)
    with ended(launched) as [(_, errors)]:
        assert launched.returncode == 0, errors[-3000:]
    assert "ended" not in errors
    assert_all_gone(tmp_path)


def test_a_killed_parent_takes_its_children_along(tmp_path):
    launched = launcher("leave", tmp_path)
    wait_until_ready(launched)
    pids = [pid_of(tmp_path, i) for i in range(2)]
    assert_none_listens_everywhere(pids)
    children = [os.pidfd_open(pid) for pid in pids]
    launched.kill()
    for child in children:
        assert select.select([child], [], [], programs.HANG_SECONDS)[0]
    launched.communicate()


def assert_none_listens_everywhere(pids):
    """Fails if a process of one host can be reached from another."""
    sockets = {
        os.readlink(path) if path.is_symlink() else ""
        for pid in pids
        for path in pathlib.Path(f"/proc/{pid}/fd").iterdir()
    }
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                found.append(local.partition(":")[0])
    assert found
    assert not [where for where in found if not where.strip("0")]


LISTENING = "0A"


def test_one_process_needs_nobody(tmp_path):
    info = processes.start(schema.Config(directory=str(tmp_path)))
    assert info == processes.ProcessInfo(1, 0, "alone", (HOST,))
    assert processes.describe_processes(info) == (
        "processes, one process:\n"
        f"process  {'host':<{len(HOST)}}  devices\n"
        f"      0  {HOST:<4}  8 x cpu (0-7)"
    )
    processes.finish(info)
    assert not [*tmp_path.iterdir()]
