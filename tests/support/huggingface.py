"""The checkpoints of tests/golden/huggingface, which another library wrote."""

import collections
import json
import pathlib
import shutil

import jax
import numpy as np

from zjax.checkpoint import start as weights
from zjax.config.load import load_config
from zjax.huggingface import model_settings
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.weights.families import FAMILIES as table
from zjax.weights.source import Source

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "huggingface"


def _of_kind(kind):
    """Names of the checkpoints that are decoders or encoders."""
    types = {
        path.parent.name: json.loads(path.read_text())["model_type"]
        for path in sorted(FOLDER.glob("*/config.json"))
    }
    return tuple(x for x, y in types.items() if table[y].constant["kind"] == kind)


FAMILIES, ENCODERS = _of_kind("decoder"), _of_kind("encoder")


def expected_of(family, name="expected"):
    """Tokens, their logits, and the text that follows them."""
    with np.load(FOLDER / family / f"{name}.npz") as file:
        return dict(file)


def copy(family, directory, **changes):
    """A copy whose config.json has other values."""
    shutil.copytree(FOLDER / family, directory, dirs_exist_ok=True)
    values = json.loads((directory / "config.json").read_text()) | changes
    values = {name: value for name, value in values.items() if value != REMOVED}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


REMOVED = "REMOVED"


def record_reads(monkeypatch):
    """Sizes of all that is read from here on, by name of the tensor."""
    open_source, sizes = weights.open_source, collections.defaultdict(list)

    def recorded(path):
        source = open_source(path)

        def read(name, index):
            found = source.read(name, index)
            sizes[name].append(found.size)
            return found

        return Source(source.entries, read)

    monkeypatch.setattr(weights, "open_source", recorded)
    return sizes


"""Value of a key to remove."""


def settings_of(family, directory=None):
    return model_settings(directory or FOLDER / family)


def make_config(family, *overrides, directory=None):
    """Settings of a run that starts from a checkpoint, of one family's shape."""
    return load_config(
        {
            "global_batch_size": 8,
            "model": settings_of(family, directory),
            "data": {"source": "synthetic"},
            "precision": {"compute_dtype": "float32"},
            "checkpoint": {"init_from": str(directory or FOLDER / family)},
        },
        *overrides,
    )


def start(config, num_devices=1):
    model = make_model(config)
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:num_devices])
