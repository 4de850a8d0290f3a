"""Options of the compiler: derived from the plan, told where unknown, kept on disk."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from zjax.errors import ConfigError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run import compiler
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans

SHAPE = schema.Model(
    num_layers=2,
    embed_size=16,
    mlp_size=32,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=64,
    max_length=8,
    use_bias=False,
)
LAYER_PARAMS = 4 * 16 * 16 + 2 * 16 * 32 + 2 * 16


def make_plan(config):
    mesh = meshes.make_mesh(config.mesh)
    model = make_model(config)
    return plans.make_plan(config, mesh, model, make_optimizer(config, model))


@pytest.mark.parametrize("layers_per_scan", [0, 1])
def test_bytes_of_a_layer(layers_per_scan):
    model = dataclasses.replace(SHAPE, layers_per_scan=layers_per_scan)
    plan = make_plan(schema.Config(model=model, data=schema.Data(length=8)))
    assert compiler.layer_bytes(plan) == 2 * LAYER_PARAMS


def test_bytes_of_a_layer_are_those_of_a_device():
    """Fails if ZeRO shares are taken for weights that never meet on a device."""
    mesh = schema.Mesh(data=4, tensor=2)
    zero = schema.Zero(stage=3, min_shard_elements=0)
    config = schema.Config(
        model=SHAPE, data=schema.Data(length=8), mesh=mesh, zero=zero
    )
    assert compiler.layer_bytes(make_plan(config)) == LAYER_PARAMS - 2 * 16 + 2 * 2 * 16


def test_collectives_of_one_layer_are_combined(monkeypatch):
    monkeypatch.setattr(compiler, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(compiler, "MIN_COMBINED_BYTES", 1)
    config = schema.Config(model=SHAPE, data=schema.Data(length=8))
    options = compiler.step_options(config, make_plan(config))
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    assert options[name] == str(2 * LAYER_PARAMS)
    config = dataclasses.replace(config, xla_options=(f"{name}=5",))
    assert compiler.step_options(config, make_plan(config))[name] == "5"


def test_collectives_of_large_layers_start_early(monkeypatch):
    monkeypatch.setattr(compiler, "platform_of", lambda mesh: "gpu")
    config = schema.Config(model=SHAPE, data=schema.Data(length=8))
    name = "xla_gpu_enable_analytical_sol_latency_estimator"
    assert name not in compiler.step_options(config, make_plan(config))
    monkeypatch.setattr(compiler, "MIN_EARLY_BYTES", 2 * LAYER_PARAMS)
    assert compiler.step_options(config, make_plan(config))[name] is False


def test_deterministic_runs_exclude_other_kernels(monkeypatch):
    monkeypatch.setattr(compiler, "platform_of", lambda mesh: "gpu")
    config = schema.Config(model=SHAPE, data=schema.Data(length=8), deterministic=True)
    options = compiler.step_options(config, make_plan(config))
    assert options["xla_gpu_exclude_nondeterministic_ops"] is True


def test_nothing_is_asked_for_on_a_cpu():
    config = schema.Config(model=SHAPE, data=schema.Data(length=8))
    assert compiler.step_options(config, make_plan(config)) == {}


def test_options_that_xla_does_not_take():
    pairs = ("xla_gpu_autotune_level=0", "xla_gpu_no_such=1", "xla_gpu_autotune_level")
    with pytest.raises(ConfigError) as error:
        compiler.parse_options(pairs)
    assert str(error.value) == (
        "xla_options='xla_gpu_no_such=1' is not an option of this XLA; "
        "look its name up for this version of jaxlib\n"
        "xla_options='xla_gpu_autotune_level' has no value; add =value"
    )


def test_unknown_option_is_left_out_and_not_fatal():
    assert not compiler._is_known("xla_gpu_no_such_thing", True)
    assert compiler._is_known("xla_gpu_enable_latency_hiding_scheduler", True)


def test_programs_are_kept_unless_the_caller_chose(monkeypatch, tmp_path):
    chosen = jax.config.jax_compilation_cache_dir
    assert compiler.use_program_cache() == (pathlib.Path(chosen) if chosen else None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert compiler.use_program_cache() == tmp_path / "zjax" / "programs"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "zjax/programs")
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)


COMMAND = """
import dataclasses
import sys
import jax
from zjax.run import compiler
from zjax.cli import main

def report():
    print(compiler.use_program_cache())
    jax.jit(lambda x: x + 1)(1)

compiler.LOADS_SIMULATED = sys.argv.pop() == "True"
main.COMMANDS["report"] = dataclasses.replace(main.COMMANDS["report"], run=report)
main.run()
"""


@pytest.mark.parametrize("loads", [True, False])
def test_simulated_devices_keep_no_programs_that_may_wait_for_ever(loads, tmp_path):
    """Fails if what a command simulates is kept where it must not be loaded, or nothing
    where it may be."""
    folder = tmp_path / "programs"
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    out = subprocess.run(
        [sys.executable, "-c", COMMAND, "report", "--simulated_devices=2", str(loads)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert out.stdout == f"{folder if loads else None}\n"
    assert folder.exists() == loads
