"""A run that averages its weights evaluates, exports and writes with the same ones."""

import numpy as np
import pytest
from safetensors import numpy as safetensors

from tests.support import small_run
from tests.support.refusals import checkpoint_error
from zjax.checkpoint.export import export_safetensors
from zjax.errors import CheckpointError

SETTINGS = (
    "optimizer.ema_decay=0.9",
    "checkpoint.every_steps=2",
    "evaluation.every_steps=2",
    small_run.EVALUATED,
    "num_steps=4",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    told = {}

    def callback(step, values):
        if "eval_loss" in values:
            told[step] = values["eval_loss"]

    directory = tmp_path_factory.mktemp("averaged")
    trainer = small_run.fit(directory, *SETTINGS, callbacks=[callback])
    return trainer, told


def test_evaluation_takes_the_average_by_default_and_says_so(trained):
    trainer, told = trained
    average = trainer.evaluate()
    assert average == trainer.evaluate("ema")
    assert average["eval_loss"] == told[4]
    assert abs(trainer.evaluate("raw")["eval_loss"] - told[4]) > 1e-3
    assert trainer.describe().endswith("rows, weights ema")


def test_what_is_exported_is_what_is_evaluated(trained, tmp_path):
    trainer, _ = trained
    for part, wanted in (("auto", trainer.state.ema), ("raw", trainer.state.master)):
        path = tmp_path / f"{part}.safetensors"
        export_safetensors(trainer.store, str(path), part=part)
        tokens = np.asarray(wanted["embedding"]["tokens"])
        found = safetensors.load_file(path)["embedding.tokens"]
        np.testing.assert_array_equal(found, tokens[: len(found)])


def test_an_earlier_step_is_evaluated_and_not_trained_on(trained):
    trainer, told = trained
    directory = trainer.config.directory
    earlier = small_run.make_trainer(directory, *SETTINGS, step=2)
    assert earlier.step == 2
    assert earlier.evaluate()["eval_loss"] == told[2] != told[4]
    with checkpoint_error(
        "step=2 is behind step 4, which is saved too; train from the newest, set "
        "the later ones aside (zjax rewind), or copy this one to another directory"
    ):
        earlier.fit()
    with pytest.raises(CheckpointError, match="3"):
        small_run.make_trainer(directory, *SETTINGS, step=3)


def test_text_is_written_with_either(trained):
    trainer, _ = trained
    texts = [
        trainer.generate("5 6 7", temperature=0.0, part=p) for p in ("auto", "ema")
    ]
    assert texts[0] == texts[1]
    assert trainer.generate("5 6 7", temperature=0.0, part="raw").startswith("5 6 7")
