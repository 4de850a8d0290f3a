"""Options of the compiler, and programs that are known by what they compute."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.refusals import config_error
from zjax.config import Config
from zjax.jaxprs.versions import knows_option
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run import compiler
from zjax.run.resume import fingerprint, fingerprint_functions
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.typing import Loss, Model
from zjax_kernels import device, grouped_matmul

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
    with config_error(
        "xla_options='xla_gpu_no_such=1' is not an option of this XLA; "
        "look its name up for this version of jaxlib\n"
        "xla_options='xla_gpu_autotune_level' has no value; add =value"
    ):
        compiler.parse_options(pairs)


def test_unknown_option_is_left_out_and_not_fatal():
    assert not knows_option("xla_gpu_no_such_thing", True)
    assert knows_option("xla_gpu_enable_latency_hiding_scheduler", True)


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

def report(given):
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


X = jnp.ones(3)
TABLE = np.arange(3.0, dtype=np.float32)


def adapted_model(init):
    return Model(
        init=lambda key: (init, {}),
        loss=lambda params, state, batch, key: Loss(X.sum(), X.sum(), {}, {}),
        bind=lambda params, state: None,
        logical=lambda params: None,
    )


def word_of(tx):
    model = adapted_model({"w": X})
    return fingerprint_functions(Config(), model, tx, compute_dtype=X.dtype)["tx"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 0.5, lambda x: x + 0.25),
        (jnp.sin, jnp.cos),
        (lambda x: x * TABLE, lambda x: x * (TABLE + 1)),
        (jax.jit(lambda x: x - 1.0), jax.jit(lambda x: x - 2.0)),
        (
            lambda x: jax.lax.scan(lambda c, y: (c * 2.0, y), x, X),
            lambda x: jax.lax.scan(lambda c, y: (c * 3.0, y), x, X),
        ),
        (lambda x: x[:1] - x[1:2], lambda x: x[1:2] - x[:1]),
    ],
)
def test_another_program_has_another_word(one, other):
    assert fingerprint(one, X) == fingerprint(lambda x: one(x), X)
    assert fingerprint(one, X) != fingerprint(other, X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optax.adam(1e-3), optax.adam(1.001e-3)),
        (optax.adam(1e-3), optax.adam(1e-3, b2=0.99)),
        (
            optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
            optax.sgd(optax.cosine_decay_schedule(0.1, 101)),
        ),
        (
            optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
            optax.inject_hyperparams(optax.adam)(learning_rate=2e-3),
        ),
    ],
)
def test_other_settings_of_an_optimizer_are_seen(one, other):
    assert word_of(one) == word_of(one)
    assert word_of(one) != word_of(other)


def act(x):
    return jax.nn.gelu(jax.nn.relu(x)) @ x


def test_the_word_is_the_same_in_another_process():
    """Fails if addresses or the order of sets reach it."""
    program = (
        "import jax, jax.numpy as jnp\n"
        "from zjax.run.resume import fingerprint\n"
        "act = lambda x: jax.nn.gelu(jax.nn.relu(x)) @ x\n"
        "print(fingerprint(act, jnp.ones(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == fingerprint(act, X)


def test_a_loss_is_traced_in_the_dtype_in_which_steps_call_it():
    """A kernel such as cuDNN's attention refuses float32."""
    traced = []

    def loss(params, state, batch, key):
        traced.append((params["w"].dtype, params["n"].dtype, batch["x"].dtype))
        return Loss(X.sum(), X.sum(), {}, {})

    model = dataclasses.replace(
        adapted_model({"w": X, "n": jnp.arange(3)}),
        loss=loss,
        inputs={"x": jax.ShapeDtypeStruct((2, 3), "float32")},
        cast=("x",),
    )
    assert fingerprint_functions(
        Config(), model, compute_dtype=jnp.bfloat16
    ).keys() == {"model"}
    assert traced == [("bfloat16", "int32", "bfloat16")]


@pytest.mark.parametrize("transpose", [False, True])
def test_kernels_for_gpus_have_a_word(transpose, monkeypatch):
    """Fails if no run with experts can be saved on a GPU."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    x, sizes = jnp.ones((256, 128), jnp.bfloat16), jnp.full(2, 128)
    weights = jnp.ones((2, 128, 128), jnp.bfloat16)

    def word(weights):
        def product(x):
            return grouped_matmul(x, weights, sizes, transpose=transpose).sum()

        return fingerprint(jax.grad(product), x)

    assert word(weights) == word(weights) != word(2 * weights)
