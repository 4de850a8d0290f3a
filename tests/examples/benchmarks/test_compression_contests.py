"""What GPTQ loses, and the compression of 8B: judgement and tiny runs."""

import json
import pathlib

import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, TINY, load
from zjax.compress.walk import AFTER, BEFORE, NEAREST


def test_the_contests_judge_the_gap_and_the_cost():
    (gap,) = load_contest(FOLDER / "gptq_gap.py").rows
    assert [(x.must, x.aim) for x in gap.cases] == [(0.6, 0.4)]
    (cost,) = load_contest(FOLDER / "compress_8b.py").rows
    assert [(x.must, x.aim) for x in cost.cases] == [(8, 5), (40, 24)]
    assert not gap.higher_is_better and not cost.higher_is_better


def test_three_bits_are_taken_where_four_lose_too_little(monkeypatch):
    module = load("gptq_quality")
    found = {
        "int4": {BEFORE: 2.0, NEAREST: 2.004, AFTER: 2.001},
        "int3": {BEFORE: 2.0, NEAREST: 2.2, AFTER: 2.1},
    }
    monkeypatch.setattr(module, "losses", lambda config, weights: found[weights])
    shares = module.measure(None)
    assert shares["weights"] == "int3"
    assert shares["gptq_share"] == pytest.approx(0.5)


def test_a_tiny_model_of_random_weights_is_compressed():
    module = load("compress_8b_ours")
    found = module.measure(zjax.load_config("llama_8b", module.QUICK))
    assert found["minutes"] > 0
    config = zjax.load_config("llama_8b", module.SETTINGS)
    assert config.model.num_layers * config.model.embed_size == 32 * 4096


@pytest.mark.slow
def test_a_tiny_run_has_a_share(monkeypatch, tmp_path, capsys):
    module = load("gptq_quality")
    text = module.compress_start.package_text
    files = sorted(pathlib.Path(zjax.__file__).parent.glob("ops/*.py"))

    def prepare_text(directory):
        options = {"tokenizer": "bytes", "validation_fraction": 0.2}
        text.prepare.prepare(files, directory, **options)

    monkeypatch.setattr(text, "prepare_text", prepare_text)
    monkeypatch.setattr(module, "LEAST_GAP", -1)
    rows = {"num_rows": 4, "num_heldout_rows": 4}
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS | rows)
    module.main(
        [
            f"--directory={tmp_path}",
            f"--text={tmp_path / 'text'}",
            *TINY,
        ]
    )
    line = capsys.readouterr().out.splitlines()[-1]
    assert "gptq_share" in json.loads(line.removeprefix("RESULT "))
