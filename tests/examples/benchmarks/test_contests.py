"""The contests of `examples/benchmarks`: fair, and able to start."""

import ast
import json
import os
import py_compile
import subprocess
import sys

import pytest
from contests.contest import Contest, load_contest

from tests.support.benchmarks import FOLDER, ROOT, config_of, options
from zjax.config import check_config
from zjax.models import flops
from zjax.models.build import make_model
from zjax.settings import schema

SCRIPTS = (
    "call_timing",
    "copy_bandwidth",
    "decode_cases",
    "decode_torch",
    "decode_transformers",
    "deepspeed_peer",
    "direct_files",
    "fsdp_peer",
    "grouped_cases",
    "grouped_torch",
    "host_link",
    "llama",
    "lora_peft",
    "matrix_product",
    "mixtures",
    "moe_cases",
    "moe_deepspeed",
    "moe_step_deepspeed",
    "moe_step_torch",
    "moe_torch",
    "pipeline_peer",
    "plain_jax",
    "published_rates",
    "rl_cases",
    "rl_trl",
    "serve_clients",
    "shape",
    "slow_network_peer",
    "tensor_peer",
    "timing",
    "torch_gpt",
    "transformers_steps",
)
TINY = {
    "num_layers": 2,
    "embed_size": 32,
    "num_heads": 2,
    "vocab_size": 64,
    "length": 16,
    "microbatch_size": 2,
}
FLOAT8 = "matmul_dtype" in schema.Precision.__dataclass_fields__


def contest_files():
    for path in sorted(FOLDER.glob("*.py")):
        if "def get_contest(" in path.read_text():
            missing = path.stem.startswith("fp8") and not FLOAT8
            reason = "precision.matmul_dtype is not a setting yet"
            skip = pytest.mark.skipif(missing, reason=reason)
            yield pytest.param(path, marks=skip, id=path.stem)


@pytest.mark.parametrize("path", [*contest_files()])
def test_every_contest_can_start(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    contest = load_contest(path)
    assert isinstance(contest, Contest)
    ran = {name for row in contest.rows for name in row.contestants()}
    assert ran == {contestant.name for contestant in contest.contestants}
    for contestant in contest.contestants:
        scripts = [w for w in contestant.command if w.startswith("examples/")]
        assert all((ROOT / script).is_file() for script in scripts)
        if contestant.kind == "zjax" and trains(contestant):
            check_config(config_of(contestant), 8)


def trains(contestant):
    """Others measure disks, kernels or layers, or have no config file."""
    words = contestant.command
    programs = (
        "_bytes.py",
        "_ours.py",
        "_quality.py",
        "_speed.py",
        "client_decode.py",
        "decode_attention.py",
        "dropping_steps.py",
        "export_back.py",
        "slow_network/train.py",
    )
    others = any(word.endswith(programs) for word in words)
    return not others and not any(word.startswith("--nvme=") for word in words)


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("gpt_1p5b", {"elementwise"}),
        ("gpt_6p7b", {"elementwise"}),
        ("tensor_6p7b", {"elementwise"}),
        ("pipeline_vs_deepspeed", {"elementwise", "full"}),
    ],
)
def test_all_of_a_contest_do_the_same_work(name, remat):
    contest = load_contest(FOLDER / f"{name}.py")
    work = set()
    for contestant in contest.contestants:
        given = options(contestant.command)
        if contestant.kind == "peer":
            size = {key: int(given[f"--{key}"]) for key in TINY}
            count = int(given.get("--num_microbatches", 1))
            batch = (size["microbatch_size"], count)
            work.add((num_matmul_params(size), size["length"], *batch))
        else:
            config = config_of(contestant)
            assert config.model.remat in remat
            batch = (config.microbatch_size, config.num_microbatches or 1)
            model = make_model(config)
            row = flops.flops_per_row(model, model.inputs)
            params = row.products / 6 / config.data.length
            work.add((params, config.data.length, *batch))
    assert len(work) == 1


def num_matmul_params(size):
    """By hand: the matrices of all blocks, and the tied head."""
    width = size["embed_size"]
    matrices = 3 * width**2 + width**2 + 2 * 4 * width**2
    return size["num_layers"] * matrices + size["vocab_size"] * width


def num_vector_params(size):
    """By hand: biases and two norms of a block, and the last norm."""
    biases, norms = 3 + 1 + 4 + 1, 2 * 2
    return (size["num_layers"] * (biases + norms) + 2) * size["embed_size"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_peers_compile_and_know_nothing_of_zjax(script, tmp_path):
    path = FOLDER / f"{script}.py"
    py_compile.compile(str(path), str(tmp_path / "out.pyc"), doraise=True)
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
    assert "zjax" not in imported


@pytest.mark.parametrize("stage", [2, 3])
def test_plain_jax_runs(stage):
    words = [f"--{name}={value}" for name, value in TINY.items()]
    result = subprocess.run(
        [sys.executable, str(FOLDER / "plain_jax.py"), f"--stage={stage}", *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if x.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    speed = found["tokens_per_second_per_device"]
    assert speed["min"] <= speed["median"] <= speed["max"]
    assert speed["n"] >= 5
    assert found["num_devices"] == 8
    assert found["loss"] < found["first_loss"]
    tflops = 6 * num_matmul_params(TINY) * speed["median"] / 1e12
    assert found["model_tflops_per_device"] == pytest.approx(tflops)
    tables = (TINY["vocab_size"] + TINY["length"]) * TINY["embed_size"]
    head = TINY["vocab_size"] * TINY["embed_size"]
    trained = num_matmul_params(TINY) + num_vector_params(TINY)
    assert found["num_params"] == trained + tables - head
