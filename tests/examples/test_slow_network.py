"""The slow network: what is started where, what is counted, and that it is slow."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support import programs
from tests.support.benchmarks import ROOT, load
from tests.support.neighbours import importing
from zjax.config import check_config, load_config
from zjax.data.draws import Sampler
from zjax.data.source import open_rows
from zjax.models import flops

FOLDER = ROOT / "examples" / "slow_network"
SMALL = (
    "num_steps=4",
    "global_batch_size=4",
    "model.num_layers=1",
    "model.embed_size=64",
    "model.max_length=16",
    "evaluation.num_batches=1",
    "optimizer.schedule.num_warmup_steps=1",
)


@pytest.fixture
def modules():
    """Imports a module of the example by its name."""
    with importing(FOLDER) as load:
        yield load


def test_methods_are_settings_that_can_work(modules):
    methods = modules("methods")
    for name in methods.METHODS:
        check_config(load_config(*methods.settings_of(name, 4)), 4)
    alone = load_config(*methods.settings_of(methods.ALONE, 4))
    assert alone.global_batch_size * 4 == methods.BASE["global_batch_size"]
    assert alone.processes.coordinator == "none"


def test_the_contest_asks_for_methods_of_the_table(modules):
    """Fails if a method was added under another name."""
    methods = modules("methods")
    contest = load("slow_network").get_contest()
    asked = {contestant.name for contestant in contest.contestants}
    assert asked <= {*methods.METHODS, *methods.PEERS}
    for contestant in contest.contestants:
        assert f"--methods={contestant.name}" in contestant.command
        assert (contestant.kind == "peer") == (contestant.name in methods.PEERS)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--methods=sgd"], "methods=sgd is unknown; use adam_float32, "),
        (["--reference=sgd"], "reference=sgd is unknown; use adam_float32, "),
        (["--nodes=3"], "nodes=3 does not divide processes=4 into equal parts on "),
        (["--nodes=1"], "nodes=1 does not divide processes=4 into equal parts on "),
        (["--megabits=0"], "megabits=0 is no rate; use 1 to 10000"),
    ],
)
def test_options_that_cannot_work_are_named(modules, words, problem, capsys):
    with pytest.raises(SystemExit):
        modules("train").parse(words)
    assert problem in capsys.readouterr().err


def test_processes_of_a_node_are_adjacent(modules):
    train = modules("train")
    given = train.parse(["--nodes=2"])
    assert [train.node_of(i, given) for i in range(4)] == [0, 0, 1, 1]
    assert [train.node_of(i, train.parse([])) for i in range(4)] == [0, 1, 2, 3]


def test_what_is_compared_with_is_measured_once(modules):
    train = modules("train")
    given = train.parse(["--methods=zero3,adam_bfloat16"])
    asked = ["zero3", "adam_bfloat16"]
    assert train.unmeasured(given, ()) == ["alone", "adam_float32", *asked]
    assert train.unmeasured(given, ("alone", "adam_float32", "zero3")) == asked


def test_a_link_is_limited_by_a_bucket_of_tokens(modules):
    network = modules("network")
    (rate,) = network.Link(50).queues("node0")
    assert " ".join(rate) == (
        "tc qdisc add dev node0 root handle 1: tbf rate 50mbit burst 131072 "
        "latency 50ms"
    )
    rate, delay = network.Link(1000, 2).queues("eth0")
    assert rate[rate.index("burst") + 1] == "250000"  # 2 ms
    assert delay[-5:] == ["netem", "delay", "2ms", "limit", "100000"]


def test_bytes_that_leave_a_node_are_counted(modules):
    """Fails if those that arrive are, or those of processes of the same node."""
    text = (
        "Inter-|   Receive                           |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes\n"
        "    lo: 11 1 0 0 0 0 0 0 12 1 0 0 0 0 0 0\n"
        "  eth0: 13 1 0 0 0 0 0 0 14 1 0 0 0 0 0 0\n"
    )
    assert modules("network").sent_bytes(text) == 14
    with pytest.raises(ValueError, match="no interface eth0"):
        modules("network").sent_bytes("lo: 1")


def make_records(records, seconds, losses, method="a"):
    """Steps of given seconds, with an evaluation after each."""
    steps = [
        {"step": i + 2, "step_seconds": x, "sent_bytes": 10**6 * i}
        for i, x in enumerate(seconds)
    ]
    evaluations = [
        {"step": i + 2, "seconds": float(sum(seconds[: i + 1])), "eval_loss": x}
        for i, x in enumerate(losses)
    ]
    return records.Records(method, {"megabits": 80}, steps, evaluations)


def test_numbers_of_a_run(modules):
    records = modules("records")
    run = make_records(records, [1.0] * 5 + [0.5] * 5, [4.0, 3.0, 2.0] + [1.0] * 7)
    alone = make_records(records, [0.3, 0.15, 0.1], [])
    reference = make_records(records, [1.0, 1.0], [4.0, 2.5 / 1.005])
    found = records.summarize(run, alone, reference)
    speeds = found["steps_per_second"]
    assert speeds == {"median": 4 / 3, "min": 1.0, "max": 2.0, "n": 5}
    assert found["mean_steps_per_second"] == pytest.approx(10 / 7.5)
    assert found["sent_bytes_per_step"] == 4.5e6
    assert found["link_share"] == pytest.approx(45 / (7.5 * 10))
    assert found["communication_share"] == pytest.approx(1 - 1.5 / 7.5)
    assert found["final_loss"] == 1.0
    assert found["seconds_to_loss"] == pytest.approx(2.5)  # between 3.0 and 2.0
    assert found["runs_per_hour"] == pytest.approx(3600 / 2.5)
    found = records.summarize(reference, alone, run)
    assert (found["seconds_to_loss"], found["runs_per_hour"]) == (None, 0.0)


def test_the_clock_leaves_out_steps_that_compile(modules, monkeypatch, tmp_path):
    records = modules("records")
    (tmp_path / "dev").write_text("eth0: 1 0 0 0 0 0 0 0 7 0")
    monkeypatch.setattr(records, "COUNTERS", tmp_path / "dev")
    times = iter([0.0, 10.0, 20.0, 22.0, 30.0, 39.0, 50.0, 53.0])
    monkeypatch.setattr(records.time, "perf_counter", lambda: next(times))
    header = {"method": "a", "setup": {"megabits": 50}}
    recorder = records.Recorder(tmp_path / "a.jsonl", header)
    for number in (1, 2, 3, 4):
        with recorder.step(number) as record:
            record["loss"] = 5.0 - number
            record["compiles"] |= number == 3
    recorder.evaluation(4, 1.5)
    found = records.read(tmp_path / "a.jsonl")
    assert found.step_seconds == [2.0, 3.0]
    assert found.evaluations == [{"step": 4, "seconds": 5.0, "eval_loss": 1.5}]
    assert records.read_all(tmp_path, {"megabits": 50}).keys() == {"a"}
    with pytest.raises(SystemExit) as error:
        records.read_all(tmp_path, {"megabits": 100})
    assert str(error.value) == (
        f"directory={tmp_path} has a of another megabits; use another directory"
    )


def test_peers_have_the_batches_and_the_model_of_zjax(modules, tmp_path):
    methods, text = modules("methods"), modules("text")
    settings = [*SMALL, "seed=3"]
    text.write_text(tmp_path / "text.npz", settings)
    with np.load(tmp_path / "text.npz") as arrays:
        found = dict(arrays)
    config = load_config(methods.BASE, *settings)
    rows = open_rows(config, "train")
    for step in range(config.num_steps):
        order = Sampler(config.seed, len(rows), config.global_batch_size).indices(step)
        batch, whole = rows.read(order), found["train"][step]
        np.testing.assert_array_equal(whole[:, :-1], batch["tokens"])
        np.testing.assert_array_equal(whole[:, 1:], batch["targets"])
        assert (batch["weights"] == 1).all()
    assert len(found["train"]) == config.num_steps
    assert found["held_out"].shape == (1, 4, 17)
    shape = json.loads(str(found["settings"]))["shape"]
    peer = load("shape").Shape(**shape, microbatch_size=1)
    assert peer.num_params == flops.num_params(config.model)


@pytest.fixture
def allowed(modules):
    network = modules("network")
    if reason := network.why_not():
        pytest.skip(reason)


PROGRAM = """
import json, pathlib, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import network
if not network.is_isolated():
    sys.exit(network.isolate([sys.executable, *sys.argv]))
with network.Network(2) as net:
    net.limit(network.Link(80))
    command = net.inside(1, ["tc", "qdisc", "show", "dev", "eth0"])
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    print(json.dumps([shown, net.measure()]), flush=True)
    program = net.start(1, ["sh", "-c", "hostname; cat /proc/net/dev; sleep 1000"])
    time.sleep(0.2)
    {end}
"""


def start(directory, end):
    """Starts the program as a shell starts one in the background: without SIGINT."""
    script = directory / "program.py"
    script.write_text(PROGRAM.format(end=end))
    words = [
        "sh",
        "-c",
        "trap '' INT; exec \"$@\"",
        "sh",
        sys.executable,
        script,
        FOLDER,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.started(words, **pipes)


def programs_of(directory):
    """Numbers of processes that have the directory in their command."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.parametrize(
    ("end", "stop", "code"),
    [
        ("raise SystemExit(3)", None, 3),
        ("time.sleep(60)", signal.SIGINT, 130),
        ("time.sleep(60)", signal.SIGTERM, 143),
        ("time.sleep(60)", signal.SIGKILL, -9),
    ],
)
def test_a_link_is_slow_and_all_of_it_is_removed(allowed, tmp_path, end, stop, code):
    """Fails without a limit, and if anything is left, whatever ended the program."""
    before = interfaces()
    with start(tmp_path, end) as program:
        shown, speed = json.loads(program.stdout.readline())
        assert "qdisc tbf" in shown and "rate 80Mbit burst 128Kb" in shown
        assert speed > 0
        assert interfaces() == before
        if stop:
            assert program.stdout.readline() == "10.0.0.2\n"
            program.send_signal(stop)  # to the first process alone
        programs.finish(program)
        assert program.returncode == code
        programs.wait_until(lambda: programs_of(tmp_path) == [])
    assert interfaces() == before


@pytest.mark.slow
def test_two_processes_train_over_a_slow_link(allowed, modules, tmp_path):
    """Fails if gradients take another way than the link, or the curve is missing."""
    flags = ["--processes=2", "--methods=adam_float32", f"--directory={tmp_path}"]
    script = str(FOLDER / "train.py")
    result = subprocess.run(
        [sys.executable, script, *flags, *SMALL], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    found = json.loads(last.removeprefix("RESULT "))
    # All of the gradient once: half of it twice, in float32; and headers.
    num_params = (257 + 16) * 64 + 12 * 64**2 + 13 * 64 + 2 * 64
    assert 1 < found["sent_bytes_per_step"] / (4 * num_params) < 1.25
    assert found["num_devices"] == 2
    assert found["final_loss"] < 5.6
    run = modules("records").read(tmp_path / "adam_float32.jsonl")
    assert [step["step"] for step in run.steps] == [2, 3, 4]
    assert np.isfinite([step["loss"] for step in run.steps]).all()
    assert (tmp_path / "slow_network.png").stat().st_size > 10_000
