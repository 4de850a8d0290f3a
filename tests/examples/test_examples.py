"""Every example runs as its reader would run it, with fewer steps."""

import importlib.util
import itertools
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import jupytext
import nbclient
import nbformat
import numpy as np
import pytest

from tests.support import wheel as wheels

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
INSTALL = EXAMPLES / "notebooks" / "install.py"
NOTEBOOKS = [path.stem for path in sorted(INSTALL.parent.glob("*.ipynb"))]
COLAB = "https://colab.research.google.com/github"


@pytest.mark.parametrize(
    ("given", "last_line"),
    [
        ("quickstart", "step 2: "),
        ("your_own_linen_model", "accuracy on new points: "),
        ("your_own_nnx_model", ""),
        ("image_classifier", "accuracy in an unseen typeface: "),
        pytest.param(
            "long_document --model=encoder", "step 2: ", marks=pytest.mark.slow
        ),
        pytest.param("long_context --length=64", "step 2: ", marks=pytest.mark.slow),
        pytest.param(
            "tensor_and_pipeline --way=pipeline", "step 2: ", marks=pytest.mark.slow
        ),
        pytest.param("tensor_and_pipeline", "step 2: ", marks=pytest.mark.slow),
        pytest.param("mixture_of_experts", "pictures: ", marks=pytest.mark.slow),
        pytest.param("data_efficiency", "picture: ", marks=pytest.mark.slow),
        pytest.param(
            "mixture_of_experts --dense",
            "loss on unseen text: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "long_document --model=decoder", "step 2: ", marks=pytest.mark.slow
        ),
    ],
)
def test_example(given, last_line, tmp_path):
    name, *flags = given.split()
    script = EXAMPLES / name / "train.py"
    command = [sys.executable, str(script), "--steps=3", *flags]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "step 0: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith(last_line)
    assert (script.parent / "README.md").read_text().count(f"{name}/train.py") == 1


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The wheel of zjax, beside an environment without zjax."""
    folder = tmp_path_factory.mktemp("fresh")
    wheel = wheels.build(folder)
    python = wheels.make_environment(folder / "venv")
    probe = "import importlib.util as u; assert not u.find_spec('zjax')"
    subprocess.run([python, "-I", "-c", probe], check=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "fresh", "language": "python"}
    kernel = folder / "jupyter" / "kernels" / "fresh" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps(spec))
    return wheel


@pytest.fixture
def kernel(fresh, monkeypatch):
    """A wheel that the kernel named `fresh` can install, and reaches no index."""
    monkeypatch.setenv("JUPYTER_PATH", str(fresh.parent / "jupyter"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return fresh


@pytest.mark.parametrize(
    ("name", "num_pictures", "text"),
    [
        ("quickstart", 2, "optimizer state"),
        pytest.param("offload", 1, "pinned_host", marks=pytest.mark.slow),
        pytest.param("mixture_of_experts", 3, "expert=2", marks=pytest.mark.slow),
        pytest.param("long_document", 4, "sparse attention: ", marks=pytest.mark.slow),
        pytest.param("communication", 2, "Streaming DiLoCo: ", marks=pytest.mark.slow),
        pytest.param("data_efficiency", 1, "window: ", marks=pytest.mark.slow),
        pytest.param("generation", 2, "the server wrote 40", marks=pytest.mark.slow),
        pytest.param("rl", 1, "of held-out prompts", marks=pytest.mark.slow),
    ],
)
def test_notebook_runs(name, num_pictures, text, kernel, monkeypatch, tmp_path):
    """Fails if a notebook needs more of zjax than its first cell installs."""
    monkeypatch.setenv("ZJAX_EXAMPLE_STEPS", "2")
    notebook = jupytext.read(EXAMPLES / "notebooks" / f"{name}.py")
    install = notebook.cells[1]
    assert install.source.count('ZJAX = ""') == 1
    install.source = install.source.replace('""', f'"{kernel.as_uri()}"', 1)
    place = nbformat.v4.new_code_cell("print(zjax.__file__)")
    notebook.cells.append(place)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="fresh", resources=where
    ).execute()
    assert place.outputs[0]["text"].startswith(str(kernel.parent / "venv"))
    outputs = outputs_of(notebook)
    pictures = sum("image/png" in out.get("data", {}) for out in outputs)
    assert pictures == num_pictures
    assert any(text in out.get("text", "") for out in outputs)
    path = EXAMPLES / "notebooks" / f"{name}.ipynb"
    built = outputs_of(nbformat.read(path, as_version=4))
    assert headings(built) == headings(outputs)


def outputs_of(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def headings(outputs):
    """First lines of tables, and warnings: what tells that a notebook is stale."""
    lines = [line for out in outputs for line in out.get("text", "").splitlines()]
    over_rules = {above for above, rule in itertools.pairwise(lines) if "───" in rule}
    return over_rules | {line for line in lines if line.startswith("WARNING")}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_built_from_its_source(name):
    """Fails if one was edited without the other."""
    source = jupytext.read(EXAMPLES / "notebooks" / f"{name}.py")
    built = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    assert [c.source for c in built.cells] == [c.source for c in source.cells]
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_opens_in_colab_and_installs_zjax_first(name):
    """Fails if a notebook installs zjax otherwise, or links to another one."""
    built = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    title, install = built.cells[:2]
    assert title.source.splitlines()[2] == "[Open in Colab][colab]"
    path = f"/zjax-project/zjax/blob/main/examples/notebooks/{name}.ipynb"
    assert title.source.endswith(f"\n[colab]: {COLAB}{path}")
    assert install.cell_type == "code"
    assert install.source == INSTALL.read_text().rstrip()
    assert install.outputs == []


@pytest.mark.parametrize(
    ("found", "driver", "installed"),
    [
        ("zjax", "", []),
        (None, "", ["zjax @ "]),
        (None, "/usr/bin/nvidia-smi", ["zjax[cuda12] @ "]),
    ],
)
def test_the_first_cell_installs_zjax_where_it_is_missing(
    monkeypatch, found, driver, installed
):
    calls = []

    def run(command, check):
        calls.append((command[1:4], command[-1], check))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    monkeypatch.setattr(subprocess, "run", run)
    source, url = INSTALL.read_text(), "file:///content/zjax"
    exec(source.replace('ZJAX = ""', f'ZJAX = "{url}"'), {})
    pip = ["-m", "pip", "install"]
    assert calls == [(pip, f"{name}{url}", True) for name in installed]
    if found is None:
        with pytest.raises(AssertionError, match="set ZJAX to the URL of its wheel"):
            exec(source, {})


def test_kinds_of_characters_and_their_experts():
    """Fails if a kind is counted for another, or a share is of all kinds."""
    example = runpy.run_path(str(EXAMPLES / "mixture_of_experts" / "train.py"))
    text = b"if a1:\n  x = '(' "
    names = list(example["KINDS"])
    kinds = example["kinds_of"](text)
    assert [names[kind] for kind in kinds] == [
        "beginning of a word",
        "rest of a word",
        "other space",
        "beginning of a word",
        "digit",
        "dot, comma, colon",
        "line break",
        "indentation",
        "indentation",
        "beginning of a word",
        "other space",
        "other sign",
        "other space",
        "quotation mark",
        "bracket",
        "quotation mark",
        "other space",
    ]
    experts = np.stack([np.arange(len(text)) % 4, np.full(len(text), 7)], 1)
    shares = example["shares_by_kind"](experts, kinds)
    marks = shares[names.index("quotation mark")].tolist()
    assert marks == [0, 0.25, 0, 0.25, 0, 0, 0, 0.5]


@pytest.mark.slow
def test_table_of_what_fits():
    script = EXAMPLES / "offload" / "fits.py"
    given = os.environ | {"ZJAX_EXAMPLE_SHAPES": "1", "ZJAX_EXAMPLE_LENGTH": "64"}
    command = [sys.executable, str(script)]
    result = subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if " GB " in line]
    assert [row.split()[1] for row in rows] == ["16", "24", "40", "80", "141"]
    assert rows[0].count("1.3B") == 3  # all on the GPU does not fit
    assert rows[-1].count("1.3B") == 4
