"""What the environment says of the processes: GPUs, memory, and mistakes in it."""

import os
import pathlib
import sys
from unittest import mock

import jax
import pytest
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from tests.support.refusals import process_error
from zjax import processes
from zjax.errors import ProcessError
from zjax.processes import host
from zjax.processes.barrier import find_unresponsive
from zjax.processes.cluster import Cluster, assign_gpus, find_cluster, visible_gpus
from zjax.processes.member_files import End, Member
from zjax.processes.start import check_members, check_platform
from zjax.processes.supervise import describe_end
from zjax.settings import schema

AUTO = schema.Processes()
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
}
NODE, MPI_HOST = "node1:61447", "10.96.0.1:62624"
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
LAUNCH = {
    "ZJAX_COORDINATOR": "localhost:4000",
    "ZJAX_NUM_PROCESSES": "2",
    "ZJAX_PROCESS_ID": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Cluster()),
        (SLURM, Cluster("slurm", 6, 5, NODE, 1, 2)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            Cluster("slurm", 6, 5, NODE, 1, 4),
        ),
        (
            SLURM | {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"},
            Cluster("slurm", 6, 5, NODE, 1, 2, owns_visible=True),
        ),
        (SLURM | {"SLURM_NTASKS": "1"}, Cluster()),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}, Cluster()),
        (OPEN_MPI, Cluster("open_mpi", 4, 2, MPI_HOST, 0, 2)),
        (LAUNCH, Cluster("zjax launch", 2, 1, "localhost:4000", 1, 2)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, Cluster()),
    ],
)
def test_finds_what_started_it(environ, expected):
    assert find_cluster(AUTO, environ) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_STEP_NODELIST": "alone"}, "alone:61447"),
        ({"SLURM_STEP_NODELIST": "a,b"}, "a:61447"),
        ({"SLURM_STEP_NODELIST": "a,b[1-2]"}, "a:61447"),
        ({"SLURM_STEP_NODELIST": "rack-1-node[007,009-012],x"}, "rack-1-node007:61447"),
        ({"SLURM_JOB_ID": "4103"}, "node1:61447"),
        ({"JAX_COORDINATOR_PORT": "5"}, "node1:5"),
        ({"JAX_COORDINATOR_ADDRESS": "b:6"}, "b:6"),
    ],
)
def test_slurm_meets_on_its_first_node(changes, expected):
    found = find_cluster(AUTO, SLURM | changes).coordinator
    assert found == expected
    if not set(changes) & {"JAX_COORDINATOR_ADDRESS"}:
        assert found == in_jax(SlurmCluster, SLURM | changes)


def test_open_mpi_meets_where_mpirun_runs():
    for address in ("10.96.0.1", "10.96.0.1,10.148.0.1"):
        uri = f"1531576320.0;tcp://{address}:34911"
        environ = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri}
        found = find_cluster(AUTO, environ).coordinator
        assert found == MPI_HOST == in_jax(OmpiCluster, environ)
    uri = "1531576320.0;tcp6://[fe80::b9b,2620:10d::2]:43370"
    environ = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri}
    assert find_cluster(AUTO, environ).coordinator == "[fe80::b9b]:62624"


def in_jax(cluster, environ):
    """What JAX itself would choose."""
    with mock.patch.dict(os.environ, environ, clear=True):
        return cluster.get_coordinator_address(1, environ.get("JAX_COORDINATOR_PORT"))


def test_none_runs_alone_anywhere():
    assert find_cluster(schema.Processes(coordinator="none"), SLURM) == Cluster()


def test_an_address_takes_from_the_scheduler_only_who_shares_the_host():
    settings = schema.Processes(coordinator="a:1", num_processes=8, process_id=2)
    expected = Cluster("address", 8, 2, "a:1", local_id=1, num_local=2)
    assert find_cluster(settings, SLURM) == expected


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (
            {k: v for k, v in OPEN_MPI.items() if k != "OMPI_MCA_orte_hnp_uri"},
            "Open MPI 5 does not say where process 0 runs",
        ),
        (KUBERNETES, "asking Kubernetes needs the package `kubernetes`"),
    ],
)
def test_a_scheduler_that_says_too_little(environ, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with process_error(
        f"processes.coordinator='auto' cannot work here: {why}; set processes."
        "coordinator=host:port, processes.num_processes and processes.process_id"
    ):
        find_cluster(AUTO, environ)


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], ()),
        (
            {},
            ["nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvme0"],
            ("0", "2", "10"),
        ),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, ["nvidia0"], ("GPU-a", "GPU-b")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], ()),
    ],
)
def test_counts_gpus_without_a_backend(tmp_path, environ, files, expected):
    for name in files:
        (tmp_path / name).touch()
    assert visible_gpus(environ, tmp_path) == expected


@pytest.mark.parametrize(
    ("cluster", "num_visible", "expected"),
    [
        (Cluster("slurm", 2), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        (Cluster("slurm", 8, local_id=3, num_local=8), 8, (3,)),
        (Cluster("slurm", 2, local_id=1, num_local=2), 8, (4, 5, 6, 7)),
        (Cluster("slurm", 8, local_id=3, num_local=8, owns_visible=True), 1, (0,)),
        (Cluster("slurm", 8, local_id=3, num_local=8), 0, ()),
    ],
)
def test_shares_the_gpus_of_a_host(cluster, num_visible, expected):
    assert assign_gpus(cluster, num_visible) == expected
    with process_error(
        "num_processes=3 on this host cannot share its 4 GPUs equally; start one "
        "process per host, or one per GPU"
    ):
        assign_gpus(Cluster("slurm", 3, local_id=1, num_local=3), 4)


def member(process_id, host, *gpus):
    return Member(process_id, host, 100 + process_id, "/runs/a", gpus)


def test_processes_share_a_directory_and_no_gpu():
    folder = pathlib.Path("/runs/a/processes")
    members = {0: member(0, "a", "0", "1"), 1: member(1, "b", "0", "1")}
    check_members(members, 2, folder)
    members[1] = member(1, "a", "1")
    with process_error(
        "processes.process_id=1 uses GPU 1 of a, which process 0 uses; give each its "
        "own CUDA_VISIBLE_DEVICES, or use `zjax launch`"
    ):
        check_members(members, 2, folder)
    with process_error(
        "directory='/runs/a' is not the same for process 1 as for this one; use a "
        "directory on a file system that all processes see"
    ):
        check_members({0: member(0, "a")}, 2, folder)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (
            (4, "cpu", 8, ""),
            "devices='cpu' leaves 4 visible GPUs idle; install zjax[cuda13], or set "
            "JAX_PLATFORMS=cpu if you mean it",
        ),
        (
            (4, "gpu", 1, ""),
            "devices=1 leaves 3 of 4 visible GPUs idle; repair the driver, or leave "
            "them out of CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_idle_devices_are_refused(seen, message):
    with process_error(message):
        check_platform(*seen)
    for busy in ((0, "cpu", 8, ""), (4, "cpu", 8, "cpu"), (4, "gpu", 4, "")):
        check_platform(*busy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("UNAVAILABLE: Task 2 heartbeat timeout. This", 2),
        ("tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks", 1),
        ("UNAVAILABLE: Failed to send RPC to coordination service. Either", 0),
        ("Segmentation fault", None),
    ],
)
def test_reads_whom_the_runtime_missed(text, expected):
    assert find_unresponsive(text) == expected


def test_an_end_before_the_process_wrote_itself_down():
    assert describe_end(End(1, 1, "exit code 2"), None) == (
        "process=1 ended (exit code 2); there is no checkpoint yet: fix the cause and "
        "start again"
    )


def test_a_run_that_cannot_be_joined(tmp_path, monkeypatch):
    jax.devices()
    module = sys.modules["zjax.processes.start"]
    monkeypatch.setattr(module, "wait_for_peers", lambda *args, **settings: None)
    settings = schema.Processes(coordinator="a:1", num_processes=2, process_id=1)
    with pytest.raises(ProcessError) as error:
        processes.start(schema.Config(directory=str(tmp_path), processes=settings))
    start, _, end = str(error.value).partition(" (")
    assert start == "processes.coordinator='a:1' could not be joined by process 1"
    assert end == (
        "jax.distributed.initialize() must be called before any JAX calls that might "
        "initialise the XLA backend. This includes any computation, but also calls to "
        "jax.devices, jax.device_put, and others.); check that all processes were "
        "started and reach this address"
    )


def test_a_parent_is_needed_where_a_scheduler_starts_several(monkeypatch):
    assert not processes.needs_parent(AUTO)
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert processes.needs_parent(AUTO)
    monkeypatch.setenv("ZJAX_MEMBERS_DIRECTORY", "/somewhere")
    assert not processes.needs_parent(AUTO)


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, 2**40),
        ("0::/", {"memory.max": 700}, 700),
        (
            "0::/job/step",
            {"memory.max": 900, "job/memory.max": 500, "job/step/memory.max": "max"},
            500,
        ),
        (
            "4:cpu:/other\n3:memory:/job",
            {"memory/job/memory.limit_in_bytes": 300, "memory/other/x": 1},
            300,
        ),
    ],
)
def test_the_least_limit_counts(monkeypatch, tmp_path, own, limits, expected):
    """Fails if a limit of a job is not seen, and arrays are killed in place of told."""
    for name, limit in limits.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "_PROCESS_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host.os, "sysconf", lambda name: 2**20)
    assert host.host_memory_bytes() == expected


TOLD = "huge pages would make placing the state faster; as root: echo always > {}"


@pytest.mark.parametrize(
    ("setting", "num_bytes", "platform", "told"),
    [
        ("always within_size advise [never] deny force", 8 * 2**30, "gpu", True),
        ("always within_size [advise] never deny force", 8 * 2**30, "gpu", True),
        ("[always] within_size advise never deny force", 8 * 2**30, "gpu", False),
        ("always [within_size] advise never deny force", 8 * 2**30, "gpu", False),
        ("always within_size advise never deny [force]", 8 * 2**30, "gpu", False),
        ("always within_size advise [never] deny force", 2**30, "gpu", False),
        ("always within_size advise [never] deny force", 8 * 2**30, "cpu", False),
        (None, 8 * 2**30, "gpu", False),
    ],
)
def test_small_pages_are_told(
    monkeypatch, tmp_path, caplog, setting, num_bytes, platform, told
):
    """Fails if a host is slow to pin and nobody says what to type, or told in vain."""
    file = tmp_path / "shmem_enabled"
    if setting is not None:
        file.write_text(f"{setting}\n")
    monkeypatch.setattr(host, "_SHARED_HUGE_PAGES", file)
    host.warn_of_small_pages(num_bytes, platform)
    said = caplog.messages
    assert said == ([TOLD.format(file)] if told else [])
