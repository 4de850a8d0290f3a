"""What `zjax bench` says of a run is what the run does."""

import dataclasses
import importlib
import json
import math
import types

import jax
import numpy as np
import pytest

from tests.support import small_run
from tests.support.refusals import bench_error
from zjax.config import load_config
from zjax.errors import ConfigError
from zjax.models import flops
from zjax.run.bench import check_losses, describe_measurement, measure, peak_bytes

measuring = importlib.import_module("zjax.run.bench")  # not the function
CONFIG = small_run.make_config(
    "never/written", "zero.min_shard_elements=0", "observe.peak_tflops=1e-3"
)
PER_STEP = CONFIG.global_batch_size * CONFIG.data.length
SLOW, QUICK = 100.0, 2.0


@pytest.fixture(scope="module")
def told():
    """Lines that `timed` logs."""
    return []


@pytest.fixture(scope="module")
def timed(told):
    """A measurement by a clock on which compiling and the first steps take long."""
    compiling, warm_up = [SLOW], [SLOW] * (measuring.WARM_UP_STEPS - 1) + [0.25]
    quick = [measuring.STEPS_PER_ROUND * QUICK] * (measuring.TIMED_ROUNDS - 1)
    lengths = [*compiling, *warm_up, *quick, 4 * quick[0]]
    ends = np.cumsum(lengths)
    ticks = iter(
        [t for end, n in zip(ends, lengths, strict=True) for t in (end - n, end)]
    )
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
        patch.setattr(measuring, "time", clock)
        log = types.SimpleNamespace(warning=lambda text, *x: told.append(text % x))
        patch.setattr(measuring, "logging", log)
        return measure(CONFIG, name="small")


def test_the_first_steps_do_not_count(timed):
    speed = timed.tokens_per_second_per_device
    assert (speed.n, timed.step_seconds.n) == (5, 5)
    assert timed.step_seconds.median == QUICK
    assert timed.step_seconds.max == 4 * QUICK
    assert speed.median == speed.max == PER_STEP / 8 / QUICK
    assert speed.min == speed.max / 4
    assert timed.compile_seconds == SLOW


def test_rounds_of_long_steps_have_few():
    """Fails if a round of steps of some seconds takes half a minute."""
    assert list(map(measuring.steps_per_round, [0.1, 0.5, 2.0, 9.0])) == [8, 8, 2, 1]


def test_each_long_step_is_told(timed, told):
    assert told == [f"step {number}: {SLOW} s" for number in (1, 2)]


def test_work_is_counted_by_both_conventions(timed):
    """6 N with N by hand: the matrices of a layer of width 16 and 32, and 61 tokens."""
    attention, mlp, head = 4 * 16 * 16, 2 * 16 * 32, 61 * 16
    n = attention + mlp + head
    speed = timed.tokens_per_second_per_device.median
    assert timed.model_tflops_per_device == pytest.approx(6 * n * speed / 1e12)
    assert timed.mfu == pytest.approx((6 * n + 6 * 16 * 16) * speed / 1e9)
    full = (6 * n + 12 * 16 * 16) * speed / 1e9
    assert timed.mfu_full_attention == pytest.approx(full)
    vectors = 4 * 16 + 32 + 16 + 3 * 2 * 16  # biases and norms
    counted = flops.num_params(CONFIG.model)
    assert timed.num_params == counted == n + vectors + 16 * 16


def test_all_numbers_are_there_and_finite(timed):
    values = json.loads(json.dumps(dataclasses.asdict(timed), allow_nan=False))
    assert values.pop("peak_bytes") is None  # as CPUs do not say
    assert values.pop("moved_state_bytes") == values.pop("disk_state_bytes") == 0
    numbers = [x for x in jax.tree.leaves(values) if not isinstance(x, str)]
    assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert values["versions"]["jax"] == jax.__version__
    assert (values["name"], values["device"], values["num_devices"]) == (
        "small",
        "cpu",
        8,
    )
    assert timed.loss < timed.first_loss < 1.2 * math.log(61)


def test_state_is_what_lies_on_a_device(timed):
    """Fails if a stage does not split, or the whole state is counted."""
    few = 4 * 8  # counters, and what does not divide by eight
    split = pytest.approx(12 * timed.num_params / 8, rel=0.05, abs=few)
    assert timed.state_bytes == split
    whole = measure(
        dataclasses.replace(
            CONFIG,
            zero=dataclasses.replace(CONFIG.zero, stage=0, min_shard_elements=16_384),
        )
    )
    assert whole.state_bytes == pytest.approx(12 * timed.num_params, abs=few)
    saved = whole.state_bytes - timed.state_bytes
    assert whole.predicted_peak_bytes - timed.predicted_peak_bytes > saved / 2


def test_the_table_shows_the_numbers(timed):
    text = describe_measurement(timed)
    assert "16 [4 to 16, n=5]" in text
    assert f"{timed.num_params:,}" in text
    assert "peak memory by the compiler" in text
    assert max(map(len, text.splitlines())) <= 100


def test_peak_is_that_of_the_fullest_device():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    full, empty = {"peak_bytes_in_use": 7}, {"peak_bytes_in_use": 3}
    assert peak_bytes([device(empty), device(full), device(None)]) == 7
    assert peak_bytes([device(None), device({})]) is None


def test_text_is_not_read_and_a_long_warm_up_is_not_waited_for():
    """Documents that are not there, at rates that would leave the loss as it is."""
    data = {"source": "tokens", "path": "no/where", "packing": "documents"}
    optimizer = {"schedule": {"num_warmup_steps": 10**8}}
    changes = {"data": data, "optimizer": optimizer, "num_steps": 10**8}
    found = measure(load_config(CONFIG, changes), devices=jax.devices()[:2])
    assert found.first_loss - found.loss > 0.01
    assert found.num_devices == 2
    assert found.loss < found.first_loss


@pytest.mark.parametrize("last", [2.5, math.nan, math.inf])
def test_a_loss_that_does_not_fall_is_refused(last):
    with bench_error(
        f"loss={last!r} did not fall from 2.5 in 3 steps on one batch; lower "
        "optimizer.peak_learning_rate, or check that the run trains"
    ):
        check_losses([2.5, 2.0, last])


def test_settings_that_cannot_work_are_refused_first():
    with pytest.raises(ConfigError, match="num_steps=0 is out of range"):
        measure(dataclasses.replace(CONFIG, num_steps=0))
