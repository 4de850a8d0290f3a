"""Speed from a clock that the test turns."""

import pytest

from zjax.config import load_config
from zjax.models.flops import flops_per_token, flops_per_weight, matmul_params
from zjax.observe import Throughput, make_throughput


class Clock:
    """Seconds that only `pass_time` moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def make(peak=1e12, num_devices=2):
    clock = Clock()
    return clock, Throughput(num_devices, peak, (1e9, 2e9), clock=clock)


def run_laps(clock, speed, *seconds, **settings):
    for lap in seconds:
        clock.pass_time(lap)
        speed.lap(100, **settings)


def test_the_first_two_laps_do_not_count():
    clock, speed = make()
    run_laps(clock, speed, 60.0, 7.0)
    assert speed.read() == {}
    run_laps(clock, speed, 0.5, 1.5)
    assert speed.read()["step_seconds"] == 1.0


def test_speed_is_over_all_devices_and_mfu_over_their_peak():
    clock, speed = make(peak=1e12, num_devices=2)
    run_laps(clock, speed, 1.0, 1.0, 0.5, 0.5)
    assert speed.read() == {
        "step_seconds": 0.5,
        "tokens_per_second": 200.0,
        "mfu": pytest.approx(200 * 1e9 / 2e12),
        "mfu_full_attention": pytest.approx(200 * 2e9 / 2e12),
    }


def test_no_mfu_without_a_peak():
    clock, speed = make(peak=None)
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    assert set(speed.read()) == {"step_seconds", "tokens_per_second"}


def test_each_reading_is_of_its_own_window():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 4.0)
    speed.read()
    run_laps(clock, speed, 2.0, 2.0)
    assert speed.read()["step_seconds"] == 2.0
    assert speed.read() == {}


def test_a_lap_that_compiled_does_not_count():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    run_laps(clock, speed, 30.0, compiled=True)
    run_laps(clock, speed, 0.5)
    assert speed.read()["step_seconds"] == 0.5


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_excluded_work_does_not_count(fails):
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0)
    clock.pass_time(0.25)
    try:
        with speed.excluded():
            clock.pass_time(90.0)
            if fails:
                raise OSError
    except OSError:
        assert fails
    run_laps(clock, speed, 0.25)
    assert speed.read()["step_seconds"] == 0.5


def test_tokens_of_steps_may_differ():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0)
    for num_tokens in (100, 300):
        clock.pass_time(1.0)
        speed.lap(num_tokens)
    assert speed.read()["tokens_per_second"] == 200.0


def mfu(config, device_kind):
    """Seconds per token and MFU of a run whose clock is the real one."""
    speed = make_throughput(config, device_kind=device_kind, num_devices=4)
    for _ in range(3):
        speed.lap(1000)
    values = speed.read()
    return values["tokens_per_second"], values.get("mfu")


@pytest.mark.parametrize(
    ("given", "device_kind", "peak"),
    [
        pytest.param(0.0, "NVIDIA H200", 989.4e12, id="table"),
        pytest.param(50.0, "NVIDIA H200", 50e12, id="setting-wins"),
        pytest.param(50.0, "cpu", 50e12, id="setting-alone"),
    ],
)
def test_the_peak_is_the_setting_or_the_table(given, device_kind, peak):
    config = load_config({"observe": {"peak_tflops": given}})
    tokens_per_second, value = mfu(config, device_kind)
    per_token = flops_per_token(
        config.model, config.data.length, causal_attention="half"
    )
    assert value == pytest.approx(tokens_per_second * per_token / (4 * peak))


def test_a_cpu_shows_no_mfu():
    assert mfu(load_config({}), "cpu")[1] is None


def test_gradients_of_frozen_weights_do_not_count():
    """Under adapters a weight costs 4 FLOPs, not 6; attention as ever."""
    config = load_config({"lora": {"rank": 8}, "observe": {"peak_tflops": 1.0}})
    tokens_per_second, value = mfu(config, "cpu")
    per_token = flops_per_token(
        config.model, config.data.length, causal_attention="half"
    )
    per_token -= 2 * matmul_params(config.model)
    assert value == pytest.approx(tokens_per_second * per_token / 4e12)


HALF_FROZEN = {
    "adapters-beside-the-head": {"lora": {"rank": 8, "also_train": ["^head/kernel"]}},
    "groups": {
        "optimizer.groups": [
            {"pattern": "^head", "learning_rate_scale": 2.0},
            {"pattern": ".", "learning_rate_scale": 0.0},
        ]
    },
}


@pytest.mark.parametrize("settings", HALF_FROZEN.values(), ids=HALF_FROZEN)
def test_gradients_of_trained_weights_count(settings):
    """Fails if all weights count as those of the blocks, which are frozen."""
    model = {"model": {"tied_head": False, "norm": "rms_norm", "vocab_size": 60_000}}
    config = load_config(model | settings)
    trained = 60_000 * 768 + 768 * ("optimizer.groups" in settings)
    expected = 4 + 2 * trained / matmul_params(config.model)
    assert flops_per_weight(config) == pytest.approx(expected, rel=1e-9)


def test_frozen_masters_have_gradients():
    """Fails if a run on disks, which computes them all, counts fewer."""
    config = load_config(
        HALF_FROZEN["groups"] | {"zero": {"memory": "nvme", "nvme_paths": ["/tmp"]}}
    )
    assert flops_per_weight(config) == 6
