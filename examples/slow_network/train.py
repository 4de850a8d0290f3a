"""Trains a small GPT over a slow network by several methods: loss against wall time.

python examples/slow_network/train.py --processes=4 --megabits=100
python examples/slow_network/train.py --processes=4 --nodes=2 --methods=zero3
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import methods
import network
import records
import report
from rich.progress import Progress

HERE = pathlib.Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
ALONE_STEPS = 12
POLL_SECONDS = 0.2
TAIL_LINES = 15


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=int, choices=range(2, 5), default=4)
    parser.add_argument("--nodes", type=int, default=0, help="as many by default")
    parser.add_argument("--megabits", type=float, default=100, help="of each link")
    parser.add_argument("--delay_ms", type=float, default=0, help="each way")
    parser.add_argument("--methods", default=",".join(methods.METHODS))
    parser.add_argument(
        "--reference", default="adam_float32", help="method whose final loss counts"
    )
    parser.add_argument("--directory", default="runs/slow_network")
    parser.add_argument("--peer_python", default=sys.executable, help="has torch")
    parser.add_argument("settings", nargs="*", help="of zjax, such as num_steps=50")
    given = parser.parse_args(words)
    given.nodes = given.nodes or given.processes
    given.methods = given.methods.split(",")
    given.directory = pathlib.Path(given.directory)
    check(parser, given)
    return given


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    known = [*methods.METHODS, *methods.PEERS]
    for field, names in (("methods", given.methods), ("reference", [given.reference])):
        for name in names:
            if name not in known:
                parser.error(f"{field}={name} is unknown; use {', '.join(known)}")
    if given.nodes < 2 or given.processes % given.nodes:
        parser.error(
            f"nodes={given.nodes} does not divide processes={given.processes} into "
            "equal parts on several nodes; use 2 or as many as processes"
        )
    if not 1 <= given.megabits <= 10_000:
        parser.error(f"megabits={given.megabits:g} is no rate; use 1 to 10000")


def setup_of(given: argparse.Namespace) -> dict[str, Any]:
    """All that must be equal for runs to be compared."""
    return {
        "num_processes": given.processes,
        "num_nodes": given.nodes,
        "megabits": given.megabits,
        "delay_ms": given.delay_ms,
        "settings": given.settings,
    }


def node_of(process_id: int, given: argparse.Namespace) -> int:
    """Processes of one node are adjacent, as devices of one host are in a mesh."""
    return process_id // (given.processes // given.nodes)


def worker_command(
    method: str, process_id: int, given: argparse.Namespace, output: pathlib.Path
) -> list[str]:
    """The command of one process of zjax."""
    alone = method == methods.ALONE
    own = output.with_suffix("") / (str(process_id) if alone else "")
    settings = [
        *given.settings,
        f"directory={own}",
        *([f"num_steps={ALONE_STEPS}", "evaluation.num_batches=0"] if alone else []),
        *([] if alone else connection(process_id, given.processes)),
    ]
    flags = [f"--method={method}", f"--setup={json.dumps(setup_of(given))}"]
    flags += [f"--output={output}", f"--process_id={process_id}"]
    return [sys.executable, str(HERE / "worker.py"), *flags, *settings]


def connection(process_id: int, num_processes: int) -> list[str]:
    """Settings by which the processes find each other."""
    return [
        f"processes.coordinator={network.address(0)}:{network.PORT}",
        f"processes.num_processes={num_processes}",
        f"processes.process_id={process_id}",
    ]


def peer_command(
    method: str, given: argparse.Namespace, output: pathlib.Path
) -> list[str]:
    """The command of any process of a peer."""
    flags = [f"--setup={json.dumps(setup_of(given))}", f"--output={output}"]
    flags += [
        f"--method={method}",
        f"--text={text_path(given)}",
        *methods.PEERS[method],
    ]
    script = str(BENCHMARKS / "slow_network_peer.py")
    return [given.peer_python, script, *flags]


def text_path(given: argparse.Namespace) -> pathlib.Path:
    return given.directory / "text.npz"


def environment(process_id: int, given: argparse.Namespace) -> dict[str, str]:
    """Variables of a process: those of torch, and the interface of its node."""
    return {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": network.INTERFACE,
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(network.PORT),
        "RANK": str(process_id),
        "WORLD_SIZE": str(given.processes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        ),
    }


def run_method(
    net: network.Network, method: str, given: argparse.Namespace, progress: Progress
) -> None:
    """Trains by one method, to the end of all processes.

    Raises:
        SystemExit: A process failed.
    """
    output = given.directory / f"{method}.jsonl"
    output.unlink(missing_ok=True)
    unfinished = output.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    programs, logs = [], []
    for process_id in range(given.processes):
        if method in methods.PEERS:
            command = peer_command(method, given, unfinished)
        else:
            command = worker_command(method, process_id, given, unfinished)
        logs.append(given.directory / f"{method}.{process_id}.log")
        with logs[-1].open("w") as log:
            program = net.start(
                node_of(process_id, given),
                command,
                env=os.environ | environment(process_id, given),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        programs.append(program)
    task = progress.add_task(method, total=None)
    while any(program.poll() is None for program in programs):
        for program, log in zip(programs, logs, strict=True):
            if program.poll():
                raise SystemExit(f"{method} failed: {log}\n{tail(log)}")
        progress.update(task, completed=count_steps(unfinished))
        time.sleep(POLL_SECONDS)
    for program, log in zip(programs, logs, strict=True):
        if program.returncode:
            raise SystemExit(f"{method} failed: {log}\n{tail(log)}")
    steps = count_steps(unfinished)
    progress.update(task, completed=steps, total=steps)
    unfinished.rename(output)


def count_steps(path: pathlib.Path) -> int:
    return path.read_text().count('"step_seconds"') if path.exists() else 0


def tail(path: pathlib.Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line[:200]}" for line in lines[-TAIL_LINES:])


def measure(given: argparse.Namespace, wanted: Sequence[str]) -> dict[str, float]:
    """Measures the plain link, then methods; bytes per second of the link."""
    link = network.Link(given.megabits, given.delay_ms)
    with network.Network(given.nodes) as net, Progress() as progress:
        speeds = {"without limit": net.measure()}
        net.limit(link)
        speeds["with limit"] = net.measure()
        for method in wanted:
            run_method(net, method, given, progress)
    return {"limit": link.bytes_per_second} | speeds


def unmeasured(given: argparse.Namespace, known: Collection[str]) -> list[str]:
    """Methods to measure: those asked for, and what they are compared with."""
    needed = [x for x in (methods.ALONE, given.reference) if x not in known]
    return list(dict.fromkeys([*needed, *given.methods]))


def main() -> None:
    given = parse()
    if not network.is_isolated():
        if reason := network.why_not():
            print(f"skipped: {reason}")
            return
        sys.exit(network.isolate([sys.executable, *sys.argv]))
    given.directory.mkdir(parents=True, exist_ok=True)
    setup = setup_of(given)
    wanted = unmeasured(given, records.read_all(given.directory, setup))
    if any(method in methods.PEERS for method in wanted):
        from text import write_text

        write_text(text_path(given), given.settings)
    speeds = measure(given, wanted)
    runs = records.read_all(given.directory, setup)
    found = report.summaries(runs, given.reference)
    report.show(found, speeds)
    report.plot(runs, given.directory / "slow_network.png")
    if len(given.methods) == 1:
        own = {"num_devices": given.processes} | found[given.methods[0]]
        print(f"RESULT {json.dumps(own)}", flush=True)


if __name__ == "__main__":
    main()
