"""The files of examples/multi_node are well formed and name settings that exist."""

import operator
import pathlib
import re
import subprocess

import pytest
import yaml

from zjax.settings import schema

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi_node"
FILES = sorted(EXAMPLE.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_and_configs_exist(path):
    text = path.read_text()
    settings = set(re.findall(r"--config\.([a-z_.0-9]+)", text))
    configs = set(re.findall(r"--config=(\S+\.py)", text))
    assert settings and configs
    for setting in settings:
        operator.attrgetter(setting)(schema.Config())
    for config in configs:
        assert (ROOT / config).is_file()


@pytest.mark.parametrize("name", ["zjax.sbatch", "mpirun.sh"])
def test_scripts_parse(name):
    subprocess.run(["bash", "-n", EXAMPLE / name], check=True)


def test_the_job_starts_as_many_pods_as_meet():
    service, job = yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())
    template = job["spec"]["template"]["spec"]
    command = template["containers"][0]["command"][-1]
    assert f"num_processes={job['spec']['parallelism']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert template["subdomain"] == service["metadata"]["name"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"coordinator={host}:" in command


def test_the_job_replaces_pods_that_were_stopped():
    """Fails if Kubernetes takes a run that SIGTERM stopped for finished."""
    _, job = yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget"}],
    }


@pytest.mark.parametrize(("status", "requeued"), [(0, ""), (1, ""), (143, "requeue 7")])
def test_slurm_queues_a_stopped_run_again(tmp_path, status, requeued):
    """Stand-ins for srun, which ends with a status, and for scontrol."""
    write_script(tmp_path / "srun", f"exit {status}")
    write_script(tmp_path / "scontrol", 'printf "%s " "$@"')
    done = subprocess.run(
        ["bash", EXAMPLE / "zjax.sbatch"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (status, requeued)


def test_mpirun_passes_each_process_its_number(tmp_path):
    """A stand-in for mpirun runs the command twice, and one for zjax shows it."""
    write_script(
        tmp_path / "mpirun",
        'while [ "$1" != bash ]; do shift; done\n'
        "for i in 0 1; do\n"
        '  OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$i "$@"\n'
        "done",
    )
    write_script(tmp_path / "zjax", 'printf "%s\\n" "$@"')
    (tmp_path / "hosts").write_text("# two hosts\nnode1 slots=8\nnode2 slots=8\n")
    done = subprocess.run(
        ["bash", EXAMPLE / "mpirun.sh", tmp_path / "hosts", "--config.seed=3"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split()
    assert words.count("--config.processes.coordinator=node1:5757") == 2
    assert words.count("--config.processes.num_processes=2") == 2
    ids = [w for w in words if w.startswith("--config.processes.process_id=")]
    assert [word[-1] for word in ids] == ["0", "1"]
    assert words.count("--config.seed=3") == 2


def write_script(path, body):
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
