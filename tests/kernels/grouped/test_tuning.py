"""The tuning of a kernel is the default one, or what was measured for its matrices."""

import json

import jax.numpy as jnp
import pytest

from zjax_kernels import tune_grouped_matmul, tunings
from zjax_kernels.grouped import search
from zjax_kernels.grouped.tuning import Tuning, choose_tuning

pytestmark = pytest.mark.usefixtures("cache")
SIZES = jnp.array([100, 28])


def test_measured_tunings_are_for_their_kernel_and_matrices(
    cache, on_hopper, monkeypatch
):
    fastest, tried = Tuning(tile_columns=128, stages=6, band=32), []

    def rank(candidates, compile_with):
        tried.append(list(candidates))
        return [(fastest, 1.0), (Tuning(), 2.0)]

    monkeypatch.setattr("zjax_kernels.grouped.search.rank", rank)
    found = tune_grouped_matmul(SIZES, 256, 128)
    assert set(found) == {"matmul", "transposed", "outer"}
    assert found["matmul"][0] == (fastest, 1.0)
    assert fastest in tried[0]
    assert [len(set(each)) for each in tried] == [16, 16, 4]
    assert choose_tuning("matmul", 2, 256, 128) == fastest
    assert choose_tuning("matmul", 2, 128, 256) == Tuning()
    assert choose_tuning("matmul", 4, 256, 128) == Tuning()
    path = cache / "zjax_kernels" / "grouped_matmul.json"
    assert len(json.loads(path.read_text())) == 3


def test_both_passes_of_an_activation_are_measured(on_hopper, monkeypatch):
    fastest = Tuning(tile_columns=128)
    monkeypatch.setattr(search, "rank", lambda *_: [(fastest, 1.0)])
    found = tune_grouped_matmul(SIZES, 256, 512, activation="swiglu")
    assert set(found) >= {"activation", "activation_backward"}
    assert choose_tuning("activation", 2, 256, 512) == fastest
    assert choose_tuning("activation_backward", 2, 256, 256) == fastest
    assert choose_tuning("activation_backward", 2, 256, 512) == Tuning()


@pytest.mark.parametrize("fields", [{"stages": 1}, {"band": 0}, {"tile_columns": 32}])
def test_impossible_tunings_of_a_file_are_passed_over(cache, caplog, fields):
    path = cache / "zjax_kernels" / "grouped_matmul.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"a": fields}))
    assert choose_tuning("outer", 2, 256, 128) == Tuning()
    assert f"{path} cannot be read" in caplog.text


def test_tunings_that_need_too_much_memory_are_left_out(monkeypatch):
    def seconds(stages):
        if stages > 2:
            raise ValueError("exceeds available shared memory")
        return float(stages)

    monkeypatch.setattr(tunings, "_seconds", seconds)
    assert tunings.rank([3, 2, 1], lambda stages: stages) == [(1, 1.0), (2, 2.0)]


def test_only_a_hopper_gpu_can_be_measured():
    with pytest.raises(NotImplementedError) as error:
        tune_grouped_matmul(SIZES, 256, 128)
    assert str(error.value) == (
        "implementation=mosaic_gpu cannot run: it needs a Hopper GPU and this is cpu; "
        "use an H100 or H200, or use implementation='reference'"
    )
