"""Detects the launcher of this process, the peers, GPUs and address of process 0."""

import contextlib
import dataclasses
import importlib.util
import ipaddress
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from zjax.errors import Problem, ProcessError
from zjax.settings import schema


class Address(NamedTuple):
    """Host and port on which process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """Text `host:port`, as in a config; an IPv6 host is in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can reach the address."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def parse_address(text: str) -> Address:
    """Parses `host:port`; an IPv6 address is in brackets.

    Example:
        >>> parse_address("[::1]:5757")
        Address(host='::1', port=5757)
    """
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def bind_address(coordinator: str) -> str | None:
    """Address on which JAX's coordinator listens; None for all interfaces.

    A loopback address is kept, so that no other machine can reach the coordinator.

    Example:
        >>> bind_address("127.0.0.1:5757"), bind_address("node1:5757")
        ('127.0.0.1:5757', None)
    """
    is_loopback = bool(coordinator) and parse_address(coordinator).is_loopback
    return coordinator if is_loopback else None


_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"
_FIRST_PORT, _PORTS = 61_440, 4_096
"""First port and number of ports for jobs, above Linux's ephemeral range."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run as seen from this process.

    Args:
        name: Launcher: `alone`, `address`, `zjax launch`, `slurm`, `open_mpi` or
            `kubernetes`.
        num_processes: Number of processes; None if JAX asks Kubernetes.
        process_id: Rank of this process, from 0 on.
        coordinator: Address `host:port` of process 0; empty if JAX asks Kubernetes.
        local_id: Rank of this process on the host, if known.
        num_local: Number of processes on this host, if known.
        owns_visible: Whether the scheduler shows each process only the devices to use.
    """

    name: str = "alone"
    num_processes: int | None = 1
    process_id: int = 0
    coordinator: str = ""
    local_id: int = 0
    num_local: int = 1
    owns_visible: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.num_processes == 1


def find_cluster(settings: schema.Processes, environ: Mapping[str, str]) -> Cluster:
    """Finds the processes of the run from settings and environment variables.

    `settings.coordinator` selects detection ("auto"), an address, or no peers ("none").
    Raises a ProcessError if the environment lacks an address.
    """
    if settings.coordinator == "none":
        return Cluster()
    # With an address in the config, the scheduler still says who shares the host.
    scheduler = find_scheduler(environ)
    if settings.coordinator != "auto":
        return dataclasses.replace(
            scheduler,
            name="address",
            num_processes=settings.num_processes,
            process_id=settings.process_id,
            coordinator=settings.coordinator,
        )
    if scheduler.is_alone:
        return Cluster()
    if scheduler.name == "open_mpi" and _OPEN_MPI_URI not in environ:
        raise _not_found("Open MPI 5 does not say where process 0 runs")
    if scheduler.name == "kubernetes" and not importlib.util.find_spec("kubernetes"):
        raise _not_found("asking Kubernetes needs the package `kubernetes`")
    return scheduler


def find_scheduler(environ: Mapping[str, str]) -> Cluster:
    """Finds the scheduler that started this process; `alone` without one."""
    if "ZJAX_COORDINATOR" in environ:
        process_id = int(environ["ZJAX_PROCESS_ID"])
        num_processes = int(environ["ZJAX_NUM_PROCESSES"])
        return Cluster(
            name="zjax launch",
            num_processes=num_processes,
            process_id=process_id,
            coordinator=environ["ZJAX_COORDINATOR"],
            local_id=process_id,
            num_local=num_processes,
        )
    # All variables: an allocation without `srun` sets only some, and is one process.
    if all(name in environ for name in _SLURM):
        return _slurm(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Cluster(
            name="open_mpi",
            num_processes=int(environ["OMPI_COMM_WORLD_SIZE"]),
            process_id=int(environ["OMPI_COMM_WORLD_RANK"]),
            coordinator=_open_mpi_address(environ),
            local_id=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
            num_local=int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        )
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        process_id = int(environ["JOB_COMPLETION_INDEX"])
        return Cluster(name="kubernetes", num_processes=None, process_id=process_id)
    return Cluster()


def visible_gpus(
    environ: Mapping[str, str], devices: pathlib.Path = pathlib.Path("/dev")
) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use, without starting a backend.

    Entries of `CUDA_VISIBLE_DEVICES`, or else numbers of the files in `/dev`. JAX must
    be told the devices before the backend starts.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        return tuple(name for name in names if name and name != "-1")
    numbers = [re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nv*")]
    return tuple(sorted((m[1] for m in numbers if m), key=int))


def assign_gpus(cluster: Cluster, num_visible: int) -> tuple[int, ...]:
    """Divides the visible GPUs of a host among the local processes.

    Returns indices among the visible GPUs.
    """
    if cluster.owns_visible:
        return tuple(range(num_visible))
    share, idle = divmod(num_visible, cluster.num_local)
    if idle:
        raise ProcessError(
            Problem(
                "num_processes",
                cluster.num_local,
                f"on this host cannot share its {num_visible} GPUs equally",
                "start one process per host, or one per GPU",
            )
        )
    start = cluster.local_id * share
    return tuple(range(start, start + share))


def _slurm(environ: Mapping[str, str]) -> Cluster:
    """Reads the environment of a Slurm step."""
    num_local = _tasks_on_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE", "1"),
        int(environ.get("SLURM_NODEID", "0")),
    )
    on_node = int(environ.get("SLURM_GPUS_ON_NODE", "0"))
    shown = len(visible_gpus(environ))
    return Cluster(
        name="slurm",
        num_processes=int(environ["SLURM_NTASKS"]),
        process_id=int(environ["SLURM_PROCID"]),
        coordinator=_slurm_address(environ),
        local_id=int(environ["SLURM_LOCALID"]),
        num_local=num_local,
        # Fewer visible GPUs than the node has: Slurm has divided the GPUs already.
        owns_visible=0 < shown < on_node,
    )


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Address on the first node of the step: `node7` for `node[7-9,12],other`."""
    prefix, _, rest = environ["SLURM_STEP_NODELIST"].partition("[")
    node = prefix.split(",")[0]
    if "," not in prefix:
        node += re.split(r"[-,\]]", rest)[0]
    return _job_address(environ, node, int(environ["SLURM_JOB_ID"]))


def _open_mpi_address(environ: Mapping[str, str]) -> str:
    """Address of `mpirun`, as in `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    uri = environ.get(_OPEN_MPI_URI, "")
    match = re.match(r"(\d+)\.\d+;tcp6?://\[?([^\],]+?)(?=[\],]|:\d+$)", uri)
    if match is None:
        return ""
    host = f"[{match[2]}]" if ":" in match[2] else match[2]
    return _job_address(environ, host, int(match[1]) >> 12)  # the low bits are 0


def _job_address(environ: Mapping[str, str], host: str, job: int) -> str:
    """Address that JAX, too, would derive: a port by job number, or two variables."""
    port = environ.get("JAX_COORDINATOR_PORT", f"{_FIRST_PORT + job % _PORTS}")
    return environ.get("JAX_COORDINATOR_ADDRESS", f"{host}:{port}")


def _tasks_on_node(layout: str, node: int) -> int:
    """Parses `4(x2),3`: four tasks on each of two nodes, three on the next node."""
    counts = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def _not_found(problem: str) -> ProcessError:
    """Error for an environment that does not give an address."""
    return ProcessError(
        Problem(
            "processes.coordinator",
            "auto",
            f"cannot work here: {problem}",
            "set processes.coordinator=host:port, processes.num_processes and "
            "processes.process_id",
        )
    )
