"""A measurement on GPUs knows their memory and their peak."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from tests.support.gpu import NEEDS_GPU
from zjax.config import load_config
from zjax.estimate.trial import weigh
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.bench import measure
from zjax.settings import schema
from zjax.settings.axes import axis_sizes

pytestmark = NEEDS_GPU
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "gpt2_124m.py"
SMALL = ("model.num_layers=4", "global_batch_size=0", "microbatch_size=16")
ON_SEQUENCE = ("mesh.data=1", "mesh.sequence=-1")
MESHES = {
    "data": ("mesh.data=-1",),
    "tensor": ("mesh.data=1", "mesh.tensor=-1"),
    "ulysses": (*ON_SEQUENCE, "model.sequence_attention=ulysses"),
    "ring": (*ON_SEQUENCE, "model.sequence_attention=ring"),
    "pipeline": ("mesh.data=1", "mesh.pipeline=-1", "num_microbatches=8"),
}


def test_memory_is_near_what_the_compiler_says():
    found = measure(load_config(CONFIG))
    assert found.peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.3)
    assert found.state_bytes < found.peak_bytes
    if found.mfu is not None:
        assert 0 < found.mfu < found.mfu_full_attention < 1


@pytest.mark.skipif(jax.device_count() not in (2, 4), reason="needs 2 or 4 GPUs")
@pytest.mark.parametrize("settings", MESHES.values(), ids=MESHES)
def test_each_mesh_takes_what_is_foretold(settings):
    """In a process of its own, as a process has one peak."""
    changes = [f"--config.{each}" for each in (*SMALL, *settings)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "zjax.cli.main",
            "bench",
            f"--config={CONFIG}",
            *changes,
        ],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    found = json.loads(line)
    config = load_config(CONFIG, *SMALL, *settings)
    mesh = schema.Mesh(**axis_sizes(config, jax.device_count()))
    model = make_model(config)
    by_formula = weigh(config, mesh, model, make_optimizer(config, model)).total
    compiled = found["predicted_peak_bytes"]
    assert found["peak_bytes"] == pytest.approx(compiled, rel=0.3)
    assert found["peak_bytes"] == pytest.approx(by_formula, rel=0.3)
