"""What a run is evaluated to: the mean over its evaluation set, on every mesh."""

import json

import numpy as np
import pytest

from tests.support import small_run, squares
from tests.support.refusals import data_error
from zjax.data import prepare
from zjax.errors import DataError

PLACES = [
    (1, "zero.stage=0"),
    (8, "zero.stage=3"),
    (2, "num_microbatches=2"),
    (8, "mesh.replica=2"),
    (8, "mesh.sequence=2"),
]


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """Settings of a run on some held-out rows that fill no batch."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{n} {n * n}"}) for n in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prepare.prepare(["text.jsonl"], "tokens", validation_fraction=0.2)
    return (
        "data.source=tokens",
        "data.path=tokens",
        "model.vocab_size=257",
        "evaluation.num_batches=-1",
        "model.dropout_rate=0",
    )


@pytest.mark.parametrize(("num_devices", "setting"), PLACES)
def test_the_mean_is_that_of_all_rows_on_every_mesh(tmp_path, num_devices, setting):
    """Fails if rows wrap, are left out, or follow the seed of the run."""
    trainer = squares.make_trainer(tmp_path, setting, "seed=3", num_devices=num_devices)
    found = trainer.evaluate()
    assert found == {"eval_loss": squares.MEAN, "evaluated_rows": 10}


def test_rows_count_by_the_weights_of_the_loss(tmp_path):
    trainer = squares.make_trainer(tmp_path, loss=squares.weighted_loss)
    found = trainer.evaluate()
    rows = np.arange(10.0)
    assert found["eval_loss"] == pytest.approx(np.average(rows**2, weights=rows))
    assert found["eval_row"] == pytest.approx(np.average(rows, weights=rows))


def test_a_number_of_batches_is_what_is_evaluated_and_told(tmp_path):
    trainer = squares.make_trainer(tmp_path, "evaluation.num_batches=1")
    assert trainer.evaluate() == {"eval_loss": 34.375, "evaluated_rows": 8}
    assert trainer.describe().endswith("evaluation: 8 of 10 rows, weights raw")
    never = squares.make_trainer(tmp_path, "evaluation.num_batches=0")
    assert never.evaluate() == {}
    assert never.describe().endswith("evaluation: none")


def test_a_list_of_batches_ends_with_a_small_one(tmp_path):
    rows = np.arange(10, dtype=np.float32)
    given = [{"x": rows[:8]}, {"x": rows[8:]}]
    trainer = squares.make_trainer(tmp_path, evaluation_batches=given)
    expected = {"eval_loss": squares.MEAN, "evaluated_rows": 10}
    assert [trainer.evaluate() for _ in range(2)] == [expected] * 2


def test_an_evaluation_set_without_batches_is_refused(tmp_path):
    trainer = squares.make_trainer(tmp_path, evaluation_batches=[])
    with data_error(
        "evaluation_batches='given' gave no batch; give an iterable that starts anew, "
        "such as a list"
    ):
        trainer.evaluate()


@pytest.mark.parametrize(
    "setting", ["zero.stage=3", "mesh.pipeline=2"], ids=["devices", "stages"]
)
def test_the_loss_of_a_token_stream_is_that_of_each_row_alone(
    tmp_path, setting, stream
):
    """Fails if the mean over a stream depends on the mesh or on the size of batches."""
    overrides = (*stream, "model.num_layers=2", setting)
    trainer = small_run.make_trainer(tmp_path, "global_batch_size=16", *overrides)
    one_by_one = small_run.make_trainer(
        tmp_path, "global_batch_size=1", *overrides[:-1], num_devices=1
    )
    expected = one_by_one.evaluate()
    assert expected["evaluated_rows"] % 16
    for name, value in trainer.evaluate().items():
        assert value == pytest.approx(expected[name], rel=1e-6)


def test_a_run_is_evaluated_on_other_data_of_its_tokenizer_alone(tmp_path, stream):
    """Fails if other held-out text is refused, or trained on as if it were the same."""
    overrides = (*stream, "model.vocab_size=300", "num_steps=1")
    overrides += ("optimizer.schedule.num_warmup_steps=0",)
    small_run.fit(tmp_path / "run", *overrides, num_devices=1)
    prepare.prepare(["text.jsonl"], "other", validation_fraction=0.4)
    prepare.prepare(
        ["text.jsonl"], "merged", tokenizer="bpe:260", validation_fraction=0.4
    )

    def opened(path):
        given = (*overrides, f"data.path={path}")
        return small_run.make_trainer(tmp_path / "run", *given, step=1, num_devices=1)

    own, other = opened("tokens"), opened("other")
    more = other.evaluate()["evaluated_rows"]
    assert more > own.evaluate()["evaluated_rows"] > 0
    with pytest.raises(DataError, match="so its samples are not these"):
        other.fit()
    with data_error(
        "data.path='merged' has tokens of 'bpe:260', and the run was trained on those "
        "of 'bytes'; prepare the text with the tokenizer of the run"
    ):
        opened("merged")
