"""Brings the processes of a run together and sees that no device is left over."""

import ctypes
import dataclasses
import io
import os
import pathlib
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.experimental import multihost_utils

from zjax.config import schema
from zjax.errors import Problem, ProcessError
from zjax.processes import lock, roster
from zjax.processes.address import bind_address
from zjax.processes.agreement import check_agreement
from zjax.processes.cluster import Cluster, count_gpus, find_cluster, own_gpus
from zjax.processes.meeting import MEETING_SECONDS, meet
from zjax.processes.roster import End, Member
from zjax.processes.together import PeerError

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The processes of a run, once they have met.

    Args:
        num_processes: How many there are.
        process_id: Which one this is.
        cluster: What started them: `alone`, `address`, `zjax launch`, `slurm`,
            `open_mpi` or `kubernetes`.
        hosts: The host of each, by number.
    """

    num_processes: int
    process_id: int
    cluster: str
    hosts: tuple[str, ...]


def start(
    config: schema.Config,
    *,
    prepare: Callable[[Cluster], None] = lambda cluster: None,
) -> ProcessInfo:
    """Finds the other processes of the run; call it before anything touches a device.

    Args:
        config: Says how to find them; its directory lies on a file system that all of
            them see.
        prepare: Called before devices are started, with what started the processes.

    Returns:
        Who they are; `describe_processes` prints it.

    Raises:
        ProcessError: They cannot meet, do not see the same directory, which another run
            may hold, use a GPU twice, leave one idle, or differ in their settings or
            software.
    """
    settings, directory = config.processes, config.directory
    cluster = find_cluster(settings, os.environ)
    gpus = count_gpus(os.environ)
    prepare(cluster)
    if cluster.is_alone:
        _check_used(len(gpus))
        return ProcessInfo(1, 0, cluster.name, (socket.gethostname(),))
    own = own_gpus(cluster, len(gpus))
    member = Member(
        process_id=cluster.process_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        directory=str(pathlib.Path(directory).absolute()),
        gpus=() if cluster.owns_visible else tuple(gpus[i] for i in own),
    )
    watched, shared = roster.watched_place(), roster.shared_place(directory)
    if watched is not None:
        roster.write_member(member, watched)
        _die_with_parent()
        _report_failures()
        _print_whole_lines()
    _meet(cluster, member)
    roster.write_member(member, shared)
    _initialize(cluster, own, settings.heartbeat_seconds)
    _check_used(len(own))
    members = roster.read_members(shared)
    check_members(members, jax.process_count(), shared)
    check_agreement(config)
    hosts = tuple(members[i].host for i in range(jax.process_count()))
    return ProcessInfo(jax.process_count(), jax.process_index(), cluster.name, hosts)


def finish(info: ProcessInfo) -> None:
    """Waits for all processes, so that none takes a slow one for dead, and parts.

    Args:
        info: What `start` returned.
    """
    if info.num_processes > 1:
        multihost_utils.sync_global_devices("zjax: all done")
        jax.distributed.shutdown()


def describe_processes(info: ProcessInfo) -> str:
    """The map of processes to devices.

    Args:
        info: What `start` returned.

    Returns:
        A table with one line for each process.
    """
    rows = [("process", "host", "devices")]
    owners = [device.process_index for device in jax.devices()]
    for process_id, host in enumerate(info.hosts):
        owned = [i for i, owner in enumerate(owners) if owner == process_id]
        kind = jax.devices()[owned[0]].device_kind
        span = f"{owned[0]}-{owned[-1]}" if len(owned) > 1 else f"{owned[0]}"
        rows.append((str(process_id), host, f"{len(owned)} x {kind} ({span})"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{p:>{widths[0]}}  {h:<{widths[1]}}  {d}" for p, h, d in rows]
    found = "one process" if info.num_processes == 1 else f"by {info.cluster}"
    return "\n".join([f"processes, {found}:", *lines])


def record_failure(error: BaseException) -> None:
    """Tells the parent why this process is about to end; exceptions do so themselves.

    The runtime lets a process that leaves wait for the others and then aborts them all,
    so that the exit codes alone do not say who began. Without a parent nothing happens.

    Args:
        error: The reason.
    """
    watched = roster.watched_place()
    if watched is None or isinstance(error, KeyboardInterrupt):
        return
    # A lost connection is what survivors see of another's death, in whatever they did;
    # and what a peer says of itself began with the peer.
    of_others = (jax.errors.JaxRuntimeError, PeerError)
    rank = 2 if any(isinstance(x, of_others) for x in _chain(error)) else 1
    first = (str(error).splitlines() or [""])[0]
    for member in roster.read_members(watched).values():
        if member.pid == os.getpid():
            end = End(member.process_id, rank, f"{type(error).__name__}: {first}")
            roster.write_end(end, member, watched)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those from which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__


def check_members(
    members: Mapping[int, Member], num_processes: int, path: pathlib.Path
) -> None:
    """Refuses processes that do not share a directory, or that share a GPU.

    Args:
        members: Who wrote themselves down.
        num_processes: How many met.
        path: Where they did.

    Raises:
        ProcessError: Some are missing, or a GPU has two owners.
    """
    missing = [i for i in range(num_processes) if i not in members]
    if missing:
        raise ProcessError(
            Problem(
                "directory",
                str(path.parent),
                f"is not the same for process {missing[0]} as for this one",
                "use a directory on a file system that all processes see",
            )
        )
    owners: dict[tuple[str, str], int] = {}
    for process_id in range(num_processes):
        member = members[process_id]
        for gpu in member.gpus:
            other = owners.setdefault((member.host, gpu), process_id)
            if other != process_id:
                raise ProcessError(
                    Problem(
                        "processes.process_id",
                        process_id,
                        f"uses GPU {gpu} of {member.host}, which process {other} uses",
                        "give each its own CUDA_VISIBLE_DEVICES, or use `zjax launch`",
                    )
                )


def check_platform(num_gpus: int, platform: str, num_used: int, asked: str) -> None:
    """Refuses to leave GPUs idle.

    Args:
        num_gpus: GPUs that are this process's own.
        platform: What JAX runs on.
        num_used: Devices that JAX found in this process.
        asked: Platforms that the user named; empty where JAX chose.

    Raises:
        ProcessError: JAX runs on the CPU unasked, or found fewer GPUs.
    """
    if num_gpus and platform == "cpu" and not asked:
        raise ProcessError(
            Problem(
                "devices",
                "cpu",
                f"leaves {num_gpus} visible GPUs idle",
                "install zjax[cuda13], or set JAX_PLATFORMS=cpu if you mean it",
            )
        )
    if platform == "gpu" and num_used < num_gpus:
        raise ProcessError(
            Problem(
                "devices",
                num_used,
                f"leaves {num_gpus - num_used} of {num_gpus} visible GPUs idle",
                "mend the driver, or leave them out of CUDA_VISIBLE_DEVICES",
            )
        )


def _check_used(num_gpus: int) -> None:
    asked = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    check_platform(num_gpus, jax.default_backend(), jax.local_device_count(), asked)


def _meet(cluster: Cluster, member: Member) -> None:
    """Locks the run's directory, and waits for the others where JAX does not."""
    refused: tuple[Problem, ...] = ()
    if member.process_id == 0:
        try:
            lock.acquire(member.directory)
        except ProcessError as error:
            refused = error.problems
    if cluster.coordinator and cluster.num_processes:
        meet(cluster.coordinator, member, cluster.num_processes, refused=refused)
    elif refused:
        raise ProcessError(*refused)


def _initialize(cluster: Cluster, own: Sequence[int], heartbeat_seconds: int) -> None:
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator or None,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=list(own) or None,
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            coordinator_bind_address=bind_address(cluster.coordinator),
            initialization_timeout=int(MEETING_SECONDS),
            heartbeat_timeout_seconds=heartbeat_seconds,
            # An exception in one process leaves it waiting here for the others.
            shutdown_timeout_seconds=heartbeat_seconds,
        )
    except RuntimeError as error:
        raise ProcessError(
            Problem(
                "processes.coordinator",
                cluster.coordinator or cluster.name,
                f"could not be joined by process {cluster.process_id} ({error})",
                "check that all processes were started and reach this address",
            )
        ) from error


def _report_failures() -> None:
    """Leaves a note of an exception that ends this process."""
    report = sys.excepthook

    def record_and_report(
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        record_failure(error)
        report(kind, error, trace)

    sys.excepthook = record_and_report


def _print_whole_lines() -> None:
    """Keeps what C++ prints out of the middle of a line of Python's."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _die_with_parent() -> None:
    """Asks Linux to end this process should its parent be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
