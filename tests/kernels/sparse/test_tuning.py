"""What a kernel is run with: the table, or what was measured and kept."""

import json

import numpy as np
import pytest

from tests.support.refusals import value_error
from zjax_kernels import tunings
from zjax_kernels.sparse import BlockLayout, make_plan, search
from zjax_kernels.sparse.tuning import H200, Tuning, choose_tuning

pytestmark = pytest.mark.usefixtures("cache")
PLAN = make_plan(BlockLayout.from_dense(np.eye(2, dtype=bool), block=64, num_heads=2))


def measure(monkeypatch, seconds):
    """Has a tuning take `seconds(tuning)`, without a GPU."""
    every_kernel = dict.fromkeys(("forward", "queries", "keys"), lambda how: how)
    monkeypatch.setattr(search, "_kernels", lambda *args: every_kernel)
    monkeypatch.setattr(tunings, "_seconds", seconds)


def test_the_table_is_used_until_something_was_measured(cache, on_hopper, monkeypatch):
    """Fails if what was measured is lost, or is used for another kernel or size."""
    assert choose_tuning("forward", 64, segmented=False) == H200["forward"][64]
    fastest = Tuning(stages=3, tiles=1, warpgroup=True)

    def seconds(how):
        if how.stages == 4:
            raise ValueError("exceeds available shared memory")
        return 1.0 if how == fastest else 2.0

    measure(monkeypatch, seconds)
    found = search.tune(PLAN, head_size=64)
    assert found["queries"][0] == (fastest, 1.0)
    assert {how.stages for how, _ in found["queries"]} == {1, 2, 3}
    assert choose_tuning("queries", 64, segmented=False) == fastest
    assert choose_tuning("queries", 128, segmented=False) == H200["queries"][128]
    kept = json.loads((cache / "zjax_kernels" / "sparse_attention.json").read_text())
    assert len(kept) == 3
    search.tune(PLAN, head_size=128)
    assert choose_tuning("queries", 64, segmented=False) == fastest


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', '{"a": {"speed": 1}}', '{"a": {"stages": -3}}']
)
def test_a_damaged_file_is_named_and_passed_over(cache, caplog, text):
    """Fails if what was kept can stop a program that only wants to run."""
    path = cache / "zjax_kernels" / "sparse_attention.json"
    path.parent.mkdir()
    path.write_text(text)
    assert choose_tuning("forward", 64, segmented=False) == H200["forward"][64]
    assert f"{path} cannot be read" in caplog.text
    assert "delete it and tune again" in caplog.text


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    cache, on_hopper, monkeypatch, caplog
):
    (cache / "zjax_kernels").write_text("a file")
    measure(monkeypatch, lambda how: 1.0)
    assert set(search.tune(PLAN, head_size=64)) == {"forward", "queries", "keys"}
    assert "cannot be written" in caplog.text


def test_what_was_measured_is_not_for_segments(cache, on_hopper, monkeypatch):
    """Fails if a kernel with segments, which take room, is run as one without."""
    measure(monkeypatch, lambda how: 1 / how.stages)
    search.tune(PLAN, head_size=64)
    assert choose_tuning("keys", 64, segmented=False) != H200["keys"][64]
    assert choose_tuning("keys", 64, segmented=True) == H200["keys"][64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": PLAN.queries}, "plan=Schedule is not a plan; give make_plan(layout)"),
        ({"batch": 0}, "batch=0 is not an integer >= 1; give 1 or more"),
        ({"head_size": "64"}, "head_size='64' is not an integer >= 1; give 1 or more"),
        (
            {"head_size": 256},
            "head_size=256 does not fit the plan, which is for up to 128 channels; use "
            "make_plan(..., head_size=256), or at most 128 channels with "
            "make_selected_plan",
        ),
    ],
    ids=["no plan", "no sequence", "text", "a plan for fewer channels"],
)
def test_what_cannot_be_measured(changes, message):
    with value_error(message):
        search.tune(**{"plan": PLAN, "head_size": 64} | changes)


def test_kernels_that_never_fit_are_named(on_hopper, monkeypatch):
    def seconds(how):
        raise ValueError("exceeds available shared memory")

    measure(monkeypatch, seconds)
    with value_error(
        "head_size=128 leaves no room in shared memory for the kernel 'forward'; use a "
        "smaller head"
    ):
        search.tune(PLAN, head_size=128)


def test_only_a_hopper_gpu_can_be_measured():
    with pytest.raises(NotImplementedError) as caught:
        search.tune(PLAN, head_size=64)
    assert str(caught.value) == (
        "implementation=mosaic_gpu cannot run: it needs a Hopper GPU and this is cpu; "
        "use an H100 or H200, or use implementation='reference'"
    )
