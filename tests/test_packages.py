"""What a user does not use need not be installed, nor read by `import zjax`."""

import importlib.metadata
import subprocess
import sys

import jax.numpy as jnp
import pytest

from zjax import errors
from zjax.checkpoint import load_weights
from zjax.checkpoint.store import Store
from zjax.cli.harness import evaluate_with_harness
from zjax.data import chat, documents, tokenizer, wrap_batches
from zjax.errors import ConfigError, PackageError
from zjax.observe import check_sinks, plot
from zjax.observe.sinks import TensorBoard
from zjax.ops.quantized import dequantize
from zjax.run.trainer import Trainer
from zjax.settings import schema

STEP = """
import jax
import jax.numpy as jnp
import optax
import zjax
import zjax_kernels

def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

model = lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
run = zjax.initialize(model, optax.sgd(0.1), loss_fn, batch)
state, metrics = run.step(run.state, batch)
assert metrics["loss"] == 1, metrics
from zjax import *
assert {*zjax.__all__} <= {*dir(zjax)} & {*globals()}
"""
"""The public API from a model of yours to a step."""


def execute(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


def test_importing_zjax_reads_none_of_them():
    names = {*errors.NEEDED_FOR, "array_record", "wandb", "mlflow"}
    program = f"import sys, zjax, zjax_kernels\nprint(*{names} & {{*sys.modules}})"
    assert execute(program) == []


def test_a_model_of_yours_takes_a_step_without_them():
    """Fails if one of them is imported on the way, or a public name is missing."""
    names = {*errors.NEEDED_FOR, "array_record"}
    execute(f"import sys\nsys.modules |= dict.fromkeys({names})\n{STEP}")


@pytest.fixture
def hidden(monkeypatch):
    for module in {*sys.modules, *errors.NEEDED_FOR}:
        if module.partition(".")[0] in errors.NEEDED_FOR:
            monkeypatch.setitem(sys.modules, module, None)


USES = {
    "grain": lambda path: wrap_batches([], schema.Config(), print),
    "jinja2": lambda path: chat.load_chat(str(path)),
    "lm_eval": lambda path: evaluate_with_harness(object.__new__(Trainer), []),
    "matplotlib": lambda path: plot.make_figure(1, 1),
    "orbax": lambda path: Store(str(path)),
    "pyarrow": lambda path: [*documents.read_documents(path / "a.parquet", "text")],
    "qwix": lambda path: dequantize(jnp.int8([[1]]), jnp.ones((1, 1))),
    "safetensors": lambda path: load_weights(str(path), {}),
    "tensorboardX": TensorBoard,
    "tokenizers": lambda path: tokenizer.train_bpe([], 258),
}


@pytest.mark.parametrize("name", errors.NEEDED_FOR)
def test_a_missing_package_is_named(name, hidden, tmp_path):
    with pytest.raises(PackageError) as error:
        USES[name](tmp_path)
    assert str(error.value) == (
        f"package={name!r} is not installed, and {errors.NEEDED_FOR[name]} need it; "
        f"pip install {'orbax-checkpoint' if name == 'orbax' else name}"
    )


def test_an_unsafe_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5")
    with pytest.raises(PackageError) as error:
        errors.check_installed("jinja2")
    assert str(error.value) == (
        "package='jinja2' is 3.1.5, and chat templates need 3.1.6 or later; "
        "pip install 'jinja2>=3.1.6'"
    )


def test_a_run_that_lacks_its_sinks_does_not_start(hidden):
    with pytest.raises(ConfigError) as error:
        Trainer({})
    assert str(error.value) == (
        "observe.sinks='tensorboard' needs a package that is not installed; "
        "pip install tensorboardX, or leave it out\n"
        "observe.plot=True needs a package that is not installed; "
        "pip install matplotlib, or set it to False"
    )
    check_sinks(schema.Observe(sinks=("console", "csv")))
