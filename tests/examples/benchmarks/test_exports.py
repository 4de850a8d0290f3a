"""The programs and the contest of exported files, on one layer."""

import json
import sys

import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load


def printed(name, monkeypatch, capfd, *flags):
    """What a program prints for its contest."""
    monkeypatch.setattr(sys, "argv", ["program.py", "--quick", *flags])
    load(name).main()
    return json.loads(capfd.readouterr().out.rpartition("RESULT ")[2])


def metrics_of(id):
    """Metrics that the contest asks of a row."""
    [row] = [x for x in load_contest(FOLDER / "exports.py").rows if x.id == id]
    return {case.metric for case in row.cases}


def test_texts_are_timed(monkeypatch, capfd):
    """Fails if the contest asks for a number that the program does not print."""
    found = printed("client_decode", monkeypatch, capfd)
    assert metrics_of("client_decode") <= {*found}
    speed, seconds = found["tokens_per_second"], found["text_seconds"]
    assert speed["n"] == 5
    assert speed["median"] == pytest.approx(8 / seconds["median"])


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_readers_of_files_agree(monkeypatch, capfd):
    found = printed("export_back", monkeypatch, capfd)
    assert metrics_of("export_back") <= {*found}
    assert found["worst difference"] < 1e-2
    # The header of a file is a hundredth of one layer.
    assert found["worst size"] < 1.05


def test_sizes_are_of_codes_scales_and_plain_arrays():
    """Two matrices of 4 bits with 16 bits for 128 inputs, and three norms."""
    model = {
        "embed_size": 128,
        "mlp_size": 0,
        "num_heads": 1,
        "num_kv_heads": 0,
        "vocab_size": 0,
        "num_layers": 1,
    }
    found = load("exported_model").closed_form("w4a16", model)
    assert found == 2 * 128 * (128 / 2 + 2) + 3 * 128 * 2
