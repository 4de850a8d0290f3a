"""What `zjax bench --generate` says of a generator is what the generator does."""

import dataclasses
import importlib
import itertools
import json
import math
import types

import pytest

from tests.support import small_run
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax.cli.measuring import bench, read_rows
from zjax.estimate.device_memory import DeviceMemory
from zjax.generation.dtypes import Dtypes
from zjax.generation.generator import Generator
from zjax.generation.sizes import sizes_of
from zjax.run.bench import Spread
from zjax.run.generation_bench import (
    _make_case,
    _time_round,
    describe_generation,
    measure_generation,
)
from zjax.run.generation_plan import plan_generation

measuring = importlib.import_module("zjax.run.generation_bench")
CONFIG = small_run.make_config("never/written", "model.max_length=64")


@pytest.fixture(scope="module")
def measured(compiled_ahead):
    """A measurement of two numbers of rows, on a device of a known memory."""
    with compiled_ahead(), pytest.MonkeyPatch.context() as patch:
        memory = DeviceMemory(1e9, 1e9)
        patch.setattr(measuring, "known_memory", lambda _: memory)
        return measure_generation(CONFIG, rows=(1, 2), num_rounds=2)


def test_all_rows_write_and_the_first_round_does_not_count(measured):
    assert [speed.num_rows for speed in measured.rows] == [1, 2]
    assert measured.num_shards == measured.num_devices == 8
    for speed in measured.rows:
        assert speed.token_seconds.n == speed.first_token_seconds.n == 2
        seconds = speed.token_seconds.median
        assert speed.new_tokens_per_second.max == pytest.approx(
            8 * speed.num_rows / speed.token_seconds.min
        )
        assert speed.share == speed.allowed_seconds / seconds
        assert speed.prompt_tokens_per_second.max == pytest.approx(
            8 * 16 * speed.num_rows / speed.first_token_seconds.min
        )
    assert measured.num_programs >= len(sizes_of(2))


def test_allowed_times_are_those_of_the_plan(measured):
    _, footprint = plan_generation(CONFIG)
    for speed in measured.rows:
        # Prompts of 16 tokens, 39 timed ones, and a pass that reads prompts.
        assert speed.allowed_seconds == footprint.step_seconds(
            speed.num_rows, 16 + 20, 1e9
        )
    assert measured.weight_bytes == footprint.resident_bytes


def test_numbers_are_finite_and_told(measured):
    values = json.loads(json.dumps(dataclasses.asdict(measured), allow_nan=False))
    rows = values.pop("rows")
    assert values["bandwidth_source"] == "data sheet"
    assert all(x["share"] > 0 and math.isfinite(x["share"]) for x in rows)
    text = describe_generation(measured)
    assert "8 data shards, tokens/s of all shards\nprompts of 16 tokens; " in text
    assert "memory of 1.00 GB/s (data sheet)" in text
    assert f"\n{measured.num_programs} programs compiled; " in text
    assert max(map(len, text.splitlines())) <= 100
    copied = dataclasses.replace(measured, bandwidth_source="copy")
    assert "memory of 1.00 GB/s (measured by a copy)" in describe_generation(copied)


def test_a_memory_that_is_not_known_is_measured(monkeypatch):
    monkeypatch.setattr(measuring, "measure_bandwidth", lambda: 7.0)
    assert measuring._find_bandwidth() == (7.0, "copy")


def fake(**attributes):
    """A generator that was not made, with some attributes."""
    generator = Generator.__new__(Generator)
    vars(generator).update(attributes)
    return generator


class FakeTicket:
    """A ticket whose news move a clock."""

    def __init__(self, clock, lengths, seconds):
        self.news = iter([*zip(lengths, seconds, strict=True)])
        self.clock, self.is_cancelled = clock, False

    def __iter__(self):
        for length, seconds in self.news:
            if self.is_cancelled:
                return
            self.clock.append(self.clock[-1] + seconds)
            yield types.SimpleNamespace(ids=[0] * length)

    def cancel(self):
        self.is_cancelled = True


def test_a_round_is_timed_by_the_last_row(monkeypatch):
    """Fails if another row is timed, the first token counts as a later one, or the
    prompts of two rounds are equal.
    """
    clock, asked = [0.0], []
    tick = itertools.count()
    ticking = {"perf_counter": lambda: clock[-1], "perf_counter_ns": lambda: next(tick)}
    monkeypatch.setattr(measuring, "time", types.SimpleNamespace(**ticking))

    def submit(prompt, sampling, *, is_streamed):
        assert not is_streamed
        asked.append(prompt)
        assert sampling.end_ids == ()
        return FakeTicket(clock, [1, 8, 8, 8], [3.0, 1.0, 1.0, 50.0])

    config = types.SimpleNamespace(vocab_size=1000)
    generator = fake(submit=submit, config=config, num_shards=2)
    case = dataclasses.replace(_make_case(3, 64), num_new=10)
    assert _time_round(generator, case, seed=0) == (3.0, 2.0 / 16)
    _time_round(generator, case, seed=1)
    assert len({tuple(prompt) for prompt in asked}) == 2 * 2 * 3
    assert {len(prompt) for prompt in asked} == {16}


def test_rows_have_room_until_the_last_one_is_timed():
    """Fails if an early row ends, and so speeds the others up."""
    for num_rows, max_length in [(1, 64), (64, 1024), (256, 4096), (256, 512)]:
        case = _make_case(num_rows, max_length)
        chunks = num_rows * -(-case.num_given // 64)
        assert case.num_passes * 8 >= chunks
        assert case.max_new_tokens == case.num_passes + case.num_new + 8
        assert case.num_given + case.max_new_tokens <= max_length
        assert case.num_new == 64 or case.num_given + case.max_new_tokens == max_length


def test_rows_that_do_not_fit_are_refused():
    with config_error(
        "rows=0 is not between 1 and 256; use 1 and 64\n"
        "rows=257 is not between 1 and 256; use 1 and 64"
    ):
        measure_generation(CONFIG, rows=(0, 257))
    generator = fake(max_length=64, num_pages=3, max_rows=8)
    with config_error(
        "rows=3 do not fit with texts of 64 tokens in 2 pages of 64; use fewer, a "
        "longer max_length, or free memory"
    ):
        measuring._make_cases(generator, (1, 3))
    found = measuring._make_cases(generator, ())
    assert [case.num_rows for case in found] == [1, 2]


def test_rows_are_read_in_rising_order():
    assert read_rows(["16", "1", "16"]) == (1, 16)
    with config_error(
        "--rows='a' is no number of rows; use numbers, such as 1,16,64\n"
        "--rows='-1' is no number of rows; use numbers, such as 1,16,64"
    ):
        read_rows(["a", "1", "-1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--rows=1", "--max_length=4"),
            "--rows=['1'] has no effect without --generate; leave it out\n"
            "--max_length=4 has no effect without --generate; leave it out",
        ),
        (
            ("--generate", "--nvme=/tmp"),
            "--generate=True has no effect with --nvme; leave it out",
        ),
        (
            ("--generate", "--model=a", "--config.seed=1"),
            "--config.seed='1' has no effect with --model; leave it out",
        ),
    ],
)
def test_flags_without_effect_are_refused(words, message):
    with config_error(message):
        bench(typed("bench", *words))


def test_the_command_prints_the_table_and_a_result(measured, monkeypatch, capsys):
    asked = []

    def measure(config, **given):
        asked.append((config.model.max_length, given))
        return measured

    command = importlib.import_module("zjax.cli.measuring")
    monkeypatch.setattr(command, "measure_generation", measure)
    words = (
        "--config=quickstart",
        "--rows=2,1",
        "--max_length=48",
        "--weight_dtype=int8",
    )
    bench(typed("bench", "--generate", *words))
    passed = {"model": "", "rows": (1, 2), "max_length": 48}
    assert asked == [(128, passed | {"dtypes": Dtypes("int8")})]
    out = capsys.readouterr().out
    assert describe_generation(measured) in out
    result = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert result["rows"][1]["num_rows"] == 2
    assert (
        Spread(**result["rows"][0]["token_seconds"]) == measured.rows[0].token_seconds
    )
