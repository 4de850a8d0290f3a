"""Epochs as the length of a run, once the rows of the data are counted."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import squares
from tests.support.refusals import config_error
from zjax.config import load_config
from zjax.data import prepare, source
from zjax.run.batch import end_by_epochs

ROWS = [{"x": [float(n)]} for n in range(10)]
BASE = {"num_epochs": 2, "global_batch_size": 8}


def test_rows_of_prepared_tokens_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{number:021}"}) for number in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare.prepare(["a.jsonl"], "tokens", validation_fraction=0.2)
    config = load_config(
        BASE | {"data.source": "tokens", "data.path": "tokens", "data.length": 16}
    )
    num_rows = len(source.open_rows(config, "train"))
    counted, text = end_by_epochs(config, None, 1)
    assert counted.num_steps == -(-2 * num_rows // 8)
    assert text == f"num_epochs=2 of {num_rows} rows: {counted.num_steps} steps"
    assert num_rows > 50


@pytest.mark.parametrize("batches", [ROWS, squares.rows()], ids=["rows", "columns"])
def test_rows_in_memory_are_counted(batches):
    counted, text = end_by_epochs(load_config(BASE), batches, 8)
    assert (counted.num_steps, counted.num_epochs) == (3, 0)
    assert text == "num_epochs=2 of 10 rows: 3 steps"
    assert end_by_epochs(counted, iter(()), 8) == (counted, "")


def test_a_batch_that_the_devices_give_is_counted():
    config = load_config(
        {"num_epochs": 2, "global_batch_size": 0, "microbatch_size": 1}
    )
    assert end_by_epochs(config, ROWS, 4)[0].num_steps == 5


@pytest.mark.parametrize(
    ("settings", "batches", "message"),
    [
        (
            {"num_steps": 1_000, "num_tokens": 7},
            ROWS,
            "num_steps=1000 has no effect with num_epochs=2.0; leave it out, or set "
            "num_epochs=0\n"
            "num_tokens=7 ends the run, as does num_epochs=2.0; leave it at 0",
        ),
        (
            {
                "data.source": "synthetic",
                "buckets": "cut",
                "sequence_warmup": "reshape",
                "curriculum.metrics": [{"index": "a"}],
            },
            None,
            "num_epochs=2.0 gives no number of steps with data.source='synthetic'; "
            "set num_steps\n"
            "num_epochs=2.0 gives no number of steps with buckets='cut'; set "
            "num_steps\n"
            "num_epochs=2.0 gives no number of steps with "
            "sequence_warmup='reshape'; set num_steps\n"
            "num_epochs=2.0 gives no number of steps with curriculum.metrics; set "
            "num_steps",
        ),
        (
            {"global_batch_size": 0, "mesh": "auto"},
            ROWS,
            "num_epochs=2.0 gives no number of steps before the mesh is chosen; set "
            "global_batch_size",
        ),
        (
            {},
            iter(()),
            "num_epochs=2.0 needs the number of rows, which ready batches do not say; "
            "set num_steps, or give a dataset or a list of rows",
        ),
        (
            {},
            {"train": ROWS},
            "batches='dict' is a mapping; give one of its values, such as "
            "batches['train']",
        ),
    ],
    ids=["second-end", "unknown", "open-mesh", "iterator", "mapping"],
)
def test_data_without_a_number_of_rows_is_refused(settings, batches, message):
    with config_error(message):
        end_by_epochs(load_config(BASE | settings), batches, 1)


def test_a_trainer_has_the_steps_and_tells_how_they_were_counted(tmp_path):
    batch = {"x": np.zeros((8, 1), np.float32)}
    params = (lambda key: {"w": jnp.ones(8)}, lambda params, x: x * params["w"][0])
    trainer = zjax.Trainer(
        BASE
        | {
            "directory": str(tmp_path),
            "optimizer": {"schedule": {"num_warmup_steps": -1}},
        },
        model=zjax.adapt(params, squares.plain_loss, batch),
        tx=optax.sgd(0.0),
        batches=ROWS,
    )
    assert (trainer.config.num_steps, trainer.config.num_epochs) == (3, 0)
    assert "num_epochs=2 of 10 rows: 3 steps" in trainer.describe().splitlines()
