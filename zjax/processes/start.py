"""Connects the processes of a run, checks the devices, and records failures."""

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

from zjax.errors import Problem, ProcessError
from zjax.processes import member_files
from zjax.processes.agreement import check_agreement
from zjax.processes.barrier import PeerError
from zjax.processes.cluster import (
    Cluster,
    assign_gpus,
    bind_address,
    find_cluster,
    visible_gpus,
)
from zjax.processes.member_files import End, Member
from zjax.processes.rendezvous import RENDEZVOUS_SECONDS, wait_for_peers
from zjax.settings import schema

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The connected processes of a run."""

    num_processes: int
    process_id: int
    cluster: str
    hosts: tuple[str, ...]


def start(
    config: schema.Config,
    *,
    prepare: Callable[[Cluster], None] = lambda cluster: None,
) -> ProcessInfo:
    """Connects all processes of the run; call it before using any device.

    `prepare` is called with the cluster before devices are started. The directory of
    the config must be on a file system that all processes share.
    """
    settings, directory = config.processes, config.directory
    cluster = find_cluster(settings, os.environ)
    gpus = visible_gpus(os.environ)
    # Environment variables such as the pinned memory limit act only before devices
    # start.
    prepare(cluster)
    if cluster.is_alone:
        _check_used(len(gpus))
        return ProcessInfo(1, 0, cluster.name, (socket.gethostname(),))
    gpu_ids = assign_gpus(cluster, len(gpus))
    member = Member(
        process_id=cluster.process_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        directory=str(pathlib.Path(directory).absolute()),
        gpus=() if cluster.owns_visible else tuple(gpus[i] for i in gpu_ids),
    )
    watched = member_files.watched_directory()
    shared = member_files.shared_directory(directory)
    # Before the rendezvous can fail, so that the parent knows this process by number.
    if watched is not None:
        member_files.write_member(member, watched)
        die_with_parent()
        _report_failures()
        _use_line_buffering()
    # JAX is initialized only once all processes have come: a failure there aborts
    # Python.
    _rendezvous(cluster, member)
    # After the rendezvous: a refused process must not replace the file of a member.
    member_files.write_member(member, shared)
    _initialize(cluster, gpu_ids, settings.heartbeat_seconds)
    _check_used(len(gpu_ids))
    members = member_files.read_members(shared)
    check_members(members, jax.process_count(), shared)
    check_agreement(config)
    hosts = tuple(members[i].host for i in range(jax.process_count()))
    return ProcessInfo(jax.process_count(), jax.process_index(), cluster.name, hosts)


def finish(info: ProcessInfo) -> None:
    """Waits for all processes and disconnects, so that no slow process loses peers."""
    if info.num_processes > 1:
        multihost_utils.sync_global_devices("zjax: all done")
        jax.distributed.shutdown()


def describe_processes(info: ProcessInfo) -> str:
    """Table of processes, hosts and devices."""
    rows = [("process", "host", "devices")]
    owners = [device.process_index for device in jax.devices()]
    for process_id, host in enumerate(info.hosts):
        owned = [i for i, owner in enumerate(owners) if owner == process_id]
        kind = jax.devices()[owned[0]].device_kind
        span = f"{owned[0]}-{owned[-1]}" if len(owned) > 1 else f"{owned[0]}"
        rows.append((str(process_id), host, f"{len(owned)} x {kind} ({span})"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{p:>{widths[0]}}  {h:<{widths[1]}}  {d}" for p, h, d in rows]
    origin = "one process" if info.num_processes == 1 else f"by {info.cluster}"
    return "\n".join([f"processes, {origin}:", *lines])


def record_failure(error: BaseException) -> None:
    """Records for the parent process why this process is about to end.

    The runtime makes a process that leaves wait for all peers and then aborts every
    process; exit codes do not show which failed first. Uncaught exceptions are recorded
    anyway. Without a parent nothing happens.
    """
    watched = member_files.watched_directory()
    if watched is None or isinstance(error, KeyboardInterrupt):
        return
    # Survivors see a lost connection; a PeerError began in another process.
    consequences = (jax.errors.JaxRuntimeError, PeerError)
    rank = 2 if any(isinstance(x, consequences) for x in _chain(error)) else 1
    first = (str(error).splitlines() or [""])[0]
    for member in member_files.read_members(watched).values():
        if member.pid == os.getpid():
            end = End(member.process_id, rank, f"{type(error).__name__}: {first}")
            member_files.write_end(end, member, watched)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and all causes."""
    while error is not None:
        yield error
        error = error.__cause__


def check_members(
    members: Mapping[int, Member], num_processes: int, path: pathlib.Path
) -> None:
    """Refuses processes that do not share the directory, or that share a GPU."""
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
    """Refuses to leave GPUs idle: JAX chose the CPU, or found fewer GPUs.

    `asked` are platforms chosen by the user; empty if JAX chose.
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
                "repair the driver, or leave them out of CUDA_VISIBLE_DEVICES",
            )
        )


def _check_used(num_gpus: int) -> None:
    """Refuses to leave any of this process's GPUs idle."""
    asked = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    check_platform(num_gpus, jax.default_backend(), jax.local_device_count(), asked)


def _rendezvous(cluster: Cluster, member: Member) -> None:
    """Locks the run's directory, and waits for all processes unless JAX does."""
    refused: tuple[Problem, ...] = ()
    if member.process_id == 0:
        try:
            member_files.acquire(member.directory)
        except ProcessError as error:
            # Not raised yet: the peers, which wait for process 0, shall hear the
            # reason.
            refused = error.problems
    if cluster.coordinator and cluster.num_processes:
        wait_for_peers(
            cluster.coordinator, member, cluster.num_processes, refused=refused
        )
    elif refused:
        raise ProcessError(*refused)


def _initialize(
    cluster: Cluster, gpu_ids: Sequence[int], heartbeat_seconds: int
) -> None:
    """Initializes JAX's distributed runtime."""
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator or None,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=list(gpu_ids) or None,
            # JAX's own detection could find another cluster than zjax did.
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            coordinator_bind_address=bind_address(cluster.coordinator),
            initialization_timeout=int(RENDEZVOUS_SECONDS),
            heartbeat_timeout_seconds=heartbeat_seconds,
            # A process that raises waits this long for its peers.
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
    """Records an exception that ends this process, before it is printed."""
    report = sys.excepthook

    def record_and_report(
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        record_failure(error)
        report(kind, error, trace)

    sys.excepthook = record_and_report


def _use_line_buffering() -> None:
    """Flushes per line, so that output of C++ does not split a line of Python."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Unbuffered (PYTHONUNBUFFERED), Python writes a line and the line end apart.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def die_with_parent(parent: int = 0) -> None:
    """Lets Linux kill this process once the parent ends, even by SIGKILL.

    `parent` is the process id of a parent that may have ended already; 0 if unknown.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before prctl, which then sends no signal.
        if parent and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
