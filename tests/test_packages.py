"""Packages: what is installed, what is imported, and what a wheel holds."""

import ast
import email
import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import beartype.roar
import jax.numpy as jnp
import pytest

from tests.support import wheel as wheels
from tests.support.refusals import config_error, package_error
from zjax import errors
from zjax.checkpoint.start import load_weights
from zjax.checkpoint.store import Store
from zjax.config import load_config, shipped
from zjax.data import chat, documents, tokenizer, wrap_batches
from zjax.errors import ConfigError
from zjax.generation.generator import Generator
from zjax.observe import check_sinks, plot
from zjax.observe.sinks import TensorBoard
from zjax.ops.rotary import rotate
from zjax.ops.rounding import dequantize_blocks
from zjax.processes.host import pinnable_bytes
from zjax.run.harness import evaluate_with_harness
from zjax.run.trainer import Trainer
from zjax.serve import Settings
from zjax.serve.app import make_app
from zjax.serve.metrics import ServerMetrics
from zjax.serve.server import Server
from zjax.serve.service import Service
from zjax.settings import schema
from zjax.weights import gguf_file

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


def test_importing_starts_no_backend_and_takes_no_optional_package():
    names = {*errors.NEEDED_FOR, "array_record", "wandb", "mlflow"}
    names.add("jax.experimental.pallas.mosaic_gpu")
    program = (
        "import sys, jax, zjax, zjax_kernels\n"
        f"print(*{names} & {{*sys.modules}})\n"
        "import zjax.observe\n"
        "print(*{'matplotlib.pyplot'} & {*sys.modules})\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once a backend runs
        "print(jax.device_count())"
    )
    assert execute(program) == ["3"]


def test_a_model_of_yours_takes_a_step_without_them():
    """Fails if one of them is imported on the way, or a public name is missing."""
    names = {*errors.NEEDED_FOR, "array_record"}
    execute(f"import sys\nsys.modules |= dict.fromkeys({names})\n{STEP}")


def is_named(module, name):
    """Whether a module of the library has a name, or is a package with the module."""
    found = importlib.import_module(module)
    if hasattr(found, name) or not hasattr(found, "__path__"):
        return hasattr(found, name)
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("folder", ["examples", "tests/gpu"])
def test_names_that_programs_import_exist(folder):
    """Fails if a name is gone that only programs read which no fast test runs."""
    gone = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            module = node.module or ""
            if module.partition(".")[0] in ("zjax", "zjax_kernels"):
                missing = [x.name for x in node.names if not is_named(module, x.name)]
                gone += [f"{path.name}: {module}.{name}" for name in missing]
    assert gone == []


@pytest.fixture
def hidden(monkeypatch):
    for module in {*sys.modules, *errors.NEEDED_FOR}:
        if module.partition(".")[0] in errors.NEEDED_FOR:
            monkeypatch.setitem(sys.modules, module, None)


USES = {
    "gguf": lambda path: gguf_file.open_header(path),
    "grain": lambda path: wrap_batches([], schema.Config(), print),
    "jinja2": lambda path: chat.load_chat(str(path)),
    "lm_eval": lambda path: evaluate_with_harness(object.__new__(Trainer), []),
    "matplotlib": lambda path: plot.make_figure(1, 1),
    "orbax": lambda path: Store(str(path)),
    "prometheus_client": lambda path: ServerMetrics(dict),
    "pyarrow": lambda path: [*documents.read_documents(path / "a.parquet", "text")],
    "qwix": lambda path: dequantize_blocks(jnp.int8([[1]]), jnp.ones((1, 1))),
    "safetensors": lambda path: load_weights(str(path), {}),
    "starlette": lambda path: make_app(object.__new__(Service)),
    "tensorboardX": TensorBoard,
    "tokenizers": lambda path: tokenizer.train_bpe([], 258),
    "uvicorn": lambda path: Server(object.__new__(Generator), Settings()),
}


@pytest.mark.parametrize("name", errors.NEEDED_FOR)
def test_a_missing_package_is_named(name, hidden, tmp_path):
    with package_error(
        f"package={name!r} is not installed, and {errors.NEEDED_FOR[name]} need it; "
        f"pip install {'orbax-checkpoint' if name == 'orbax' else name}"
    ):
        USES[name](tmp_path)


def test_an_unsafe_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5")
    with package_error(
        "package='jinja2' is 3.1.5, and chat templates need 3.1.6 or later; "
        "pip install 'jinja2>=3.1.6'"
    ):
        errors.check_installed("jinja2")


def test_a_run_that_lacks_its_sinks_does_not_start(hidden):
    with config_error(
        "observe.sinks='tensorboard' needs a package that is not installed; "
        "pip install tensorboardX, or leave it out\n"
        "observe.plot=True needs a package that is not installed; "
        "pip install matplotlib, or set it to False"
    ):
        Trainer({})
    check_sinks(schema.Observe(sinks=("console", "csv")))


ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAX_BYTES = 10 * 2**20


def test_metadata_says_where_zjax_is_from():
    project = PYPROJECT["project"]
    repository = project["urls"]["Repository"]
    assert all(url.startswith(repository) for url in project["urls"].values())
    assert {*project["urls"]} >= {"Documentation", "Changelog", "Issues"}
    assert project["license"] == "Apache-2.0"
    assert "Typing :: Typed" in project["classifiers"]
    assert not [x for x in project["classifiers"] if x.startswith("License ::")]
    for package in ("zjax", "zjax_kernels"):
        assert (ROOT / package / "py.typed").is_file()


def test_the_page_of_the_package_has_absolute_links():
    """Fails if a link of the README leads nowhere without the repository around it."""
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = before = (ROOT / "README.md").read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert_absolute(text)
    base = PYPROJECT["project"]["urls"]["Repository"]
    shown = {re.sub(f"^{base}/(raw|blob)/main/", "", x) for x in LINK.findall(text)}
    assert shown == {*LINK.findall(before)}
    assert f"]({base}/raw/main/examples/quickstart/training.png)" in text


def assert_absolute(text):
    links = LINK.findall(text)
    assert links
    assert [x for x in links if not x.startswith(("https://", "#"))] == []


def test_the_image_is_in_step_with_the_package():
    """Fails if the image has a Python, a CUDA or a program that zjax does not have."""
    text = (ROOT / "Dockerfile").read_text()
    project = PYPROJECT["project"]
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", text, re.M)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    (extra,) = re.findall(r"^RUN pip install --no-cache-dir '\.\[(\w+)\]'$", text, re.M)
    assert project["optional-dependencies"][extra] == [f"jax[{extra}]"]
    notebook = (ROOT / "examples" / "notebooks" / "install.py").read_text()
    assert f'"[{extra}]"' in notebook
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.M)
    assert json.loads(entry)[0] in project["scripts"]  # a shell would keep signals
    (config,) = re.findall(r"--config=(\w+)$", text, re.M)
    assert shipped.find_config(config).is_file()


def test_the_image_is_built_from_all_that_the_package_needs():
    """Fails if a file is missing where the image is built, or `.git` goes there."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    hatch = PYPROJECT["tool"]["hatch"]
    readme = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    needed = {"pyproject.toml", *PYPROJECT["project"]["license-files"]}
    needed |= {*hatch["build"]["targets"]["wheel"]["only-include"]}
    needed |= {fragment["path"] for fragment in readme}
    assert rules[0] == "*"
    assert sent == needed
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize("folder", ["configs", "zjax/configs"])
def test_a_name_is_a_config_of_a_clone_or_of_a_wheel(folder, tmp_path, monkeypatch):
    """Fails if a wheel is looked through where only a clone has configs."""
    path = tmp_path / folder / "small.py"
    path.parent.mkdir(parents=True)
    path.write_text("def get_config(): return {'num_steps': 7}")
    folders = (tmp_path / "zjax" / "configs", tmp_path / "configs")
    monkeypatch.setattr(shipped, "_FOLDERS", folders)
    assert load_config("small").num_steps == 7


def test_a_file_without_a_suffix_is_not_a_name(tmp_path):
    with pytest.raises(ConfigError, match="is not a config file"):
        load_config(tmp_path / "quickstart")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quickstat", "did you mean quickstart?"),
        ("another", "give the path of a .py or .gin file"),
    ],
)
def test_an_unknown_name_is_refused(name, remedy):
    with config_error(f"config={name!r} is not the name of a config of zjax; {remedy}"):
        load_config(name)


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs_need(tmp_path):
    """Fails if a wheel lacks a module, a config or its types, or has more than that."""
    path = wheels.build(tmp_path)
    assert path.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(wheel.read(metadata))
        quickstart = wheel.read("zjax/configs/quickstart.py")
    packages = [ROOT / name for name in ("zjax", "zjax_kernels")]
    modules = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (*package.rglob("*.py"), package / "py.typed")
    }
    configs = {f"zjax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {x for x in names if x.endswith((".py", "py.typed"))} == modules | configs
    assert not [x for x in names if x.endswith((".pyc", ".gin"))]
    assert quickstart == (ROOT / "configs" / "quickstart.py").read_bytes()
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Description-Content-Type"] == "text/markdown"
    assert_absolute(described.get_payload())


def test_shapes_that_do_not_agree_are_refused():
    x, table = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 4))
    rotate(x, table, table)
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        rotate(x, table, jnp.ones((1, 5, 4)))


def test_other_types_are_refused():
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        pinnable_bytes("1")
