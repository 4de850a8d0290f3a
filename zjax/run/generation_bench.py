"""Measures how fast a generator reads prompts and writes texts, on random tokens."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring
import numpy as np

from zjax.config.load import load_config
from zjax.errors import ConfigError, Problem
from zjax.estimate.device_memory import known_memory, measure_bandwidth
from zjax.generation.dtypes import COMPUTE, Dtypes
from zjax.generation.footprint import Footprint
from zjax.generation.generator import Generator
from zjax.generation.loading import WITHOUT_MOMENTS
from zjax.generation.plan import NUM_STEPS
from zjax.generation.sampling import Sampling
from zjax.generation.sizes import MAX_ROWS, NUM_CHUNKS, PAGE_SIZE
from zjax.models.build import make_model
from zjax.processes.agreement import versions
from zjax.run.bench import Spread
from zjax.run.build import start_run
from zjax.run.generation_plan import describe_shards, plan_generation
from zjax.settings.schema import Config
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.memory import num_params
from zjax.sharding.mesh import make_mesh

TIMED_ROUNDS = 5
_NUM_GIVEN, _NUM_NEW = 512, 64
"""Most tokens of a prompt, and most tokens that are timed behind it."""
_LEAST_NEW = 8
_DEFAULT_ROWS = 64
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class RowsSpeed:
    """Speed of a generator with a number of rows, all of which begin together.

    Args:
        num_rows: Texts that each data shard writes at once.
        prompt_tokens_per_second: Tokens of all prompts, over the seconds to the first
            token of the last text.
        first_token_seconds: Seconds from the requests to the first token of the last
            text.
        token_seconds: Seconds of a token of every row, while all rows write.
        new_tokens_per_second: New tokens of all rows of all data shards.
        allowed_seconds: Least seconds of a token of every row by the memory of the
            device, or by the link to weights that are offloaded.
        share: Part of the allowed speed that is reached.
    """

    num_rows: int
    prompt_tokens_per_second: Spread
    first_token_seconds: Spread
    token_seconds: Spread
    new_tokens_per_second: Spread
    allowed_seconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class GenerationSpeed:
    """Speed of a generator on random tokens.

    Args:
        device: Kind of the devices, such as "NVIDIA H100".
        num_devices: Number of devices.
        num_shards: Data shards, which have rows apart.
        num_params: Number of parameters of the model.
        num_given: Tokens of each prompt.
        weight_bytes: Bytes of the weights on a device.
        bytes_per_second: Bytes per second of the memory of a device.
        bandwidth_source: `data sheet`, or `copy` if it was measured.
        num_programs: Programs that were compiled.
        start_seconds: Seconds until the weights are there and the first text is
            written, with all compilation.
        rows: Speed by the number of rows.
        versions: Versions of Python and packages.
    """

    device: str
    num_devices: int
    num_shards: int
    num_params: int
    num_given: int
    weight_bytes: int
    bytes_per_second: float
    bandwidth_source: str
    num_programs: int
    start_seconds: float
    rows: tuple[RowsSpeed, ...]
    versions: Mapping[str, str]


def measure_generation(
    config: Config,
    *,
    model: str = "",
    rows: Sequence[int] = (),
    max_length: int = 0,
    dtypes: Dtypes = COMPUTE,
    num_rounds: int = TIMED_ROUNDS,
) -> GenerationSpeed:
    """Writes texts behind random prompts, and times them.

    Args:
        config: Settings of a run of the built-in decoder, whose weights are random.
        model: Directory of a Hugging Face checkpoint to read, in place of random
            weights; `config` then has the settings of the checkpoint.
        rows: Numbers of texts that each data shard writes at once, 1 to 256; () is 1,
            and 64 or as many as fit.
        max_length: Most tokens of a prompt with a text; 0 is what the model allows.
        dtypes: How weights and keys are stored.
        num_rounds: Timed rounds behind one that is not timed, 1 or more.

    Raises:
        ConfigError: A number is out of range, or the model writes no text.
    """
    if wrong := [x for x in rows if not 1 <= x <= MAX_ROWS]:
        problem, remedy = f"is not between 1 and {MAX_ROWS}", "use 1 and 64"
        raise ConfigError(*(Problem("rows", x, problem, remedy) for x in wrong))
    plan, footprint = plan_generation(config, dtypes=dtypes)
    bandwidth, source = _find_bandwidth()
    start = time.perf_counter()
    with _counted_programs() as programs:
        opened = (model,) if model else (_RandomRun(config), ())
        with Generator(
            *opened,
            max_rows=max(rows, default=_DEFAULT_ROWS),
            max_length=max_length,
            weight_dtype=dtypes.weights,
            cache_dtype=dtypes.cache,
        ) as generator:
            cases = _make_cases(generator, rows)
            _time_round(generator, cases[-1], seed=0)
            start_seconds = time.perf_counter() - start
            found = [
                _time_case(generator, case, num_rounds, footprint, bandwidth)
                for case in cases
            ]
    return GenerationSpeed(
        device=jax.devices()[0].device_kind,
        num_devices=plan.mesh.size,
        num_shards=generator.num_shards,
        num_params=num_params(plan),
        num_given=cases[0].num_given,
        weight_bytes=footprint.resident_bytes,
        bytes_per_second=bandwidth,
        bandwidth_source=source,
        num_programs=len(programs),
        start_seconds=start_seconds,
        rows=tuple(found),
        versions=versions(),
    )


def describe_generation(speed: GenerationSpeed) -> str:
    """Formats a table of at most 100 columns."""
    cells = [
        (
            f"{each.num_rows}",
            f"{each.prompt_tokens_per_second.median:,.0f}",
            f"{1e3 * each.first_token_seconds.median:.3g}",
            f"{each.new_tokens_per_second.median:,.0f}",
            each.token_seconds.describe(lambda x: f"{1e3 * x:.3g}"),
            f"{1e3 * each.allowed_seconds:.3g}",
            f"{each.share:.1%}",
        )
        for each in speed.rows
    ]
    columns = "rows", "prompt tok/s", "first ms", "new tok/s", "ms a token"
    table = render_table((*columns, "allowed", "share"), cells, right=range(7))
    source = {"copy": "measured by a copy"}.get(speed.bandwidth_source, "data sheet")
    return (
        f"generation with {speed.num_params:,} parameters on {speed.num_devices} x "
        f"{speed.device}\n{describe_shards(speed.num_shards)}"
        f"prompts of {speed.num_given:,} tokens; {format_bytes(speed.weight_bytes)} of "
        f"weights on a device, memory of {format_bytes(speed.bytes_per_second)}/s "
        f"({source})\n\n{table}\n\n"
        "first: the first token of the last text, as all prompts arrive together\n"
        "allowed: ms a token by the memory; share: what of this speed is reached\n"
        f"{speed.num_programs} programs compiled; {speed.start_seconds:.1f} s from the "
        "start to the first texts"
    )


@dataclasses.dataclass(frozen=True)
class _Case:
    """Rows that begin together.

    Args:
        num_rows: Rows of each data shard.
        num_given: Tokens of each prompt.
        num_new: Tokens of the last row that are timed.
        num_passes: Passes that read all prompts, while the first rows write.
    """

    num_rows: int
    num_given: int
    num_new: int
    num_passes: int

    @property
    def max_new_tokens(self) -> int:
        """Tokens that no row reaches before the last row has the timed ones."""
        return self.num_passes + self.num_new + NUM_STEPS

    @property
    def num_pages(self) -> int:
        """Pages of all rows of a data shard."""
        length = self.num_given + self.max_new_tokens
        return self.num_rows * -(-length // PAGE_SIZE)

    @property
    def mean_length(self) -> int:
        """Tokens of a row in the middle of the timed tokens, on average."""
        return self.num_given + (self.num_passes + self.num_new) // 2


def _make_case(num_rows: int, max_length: int) -> _Case:
    """Chooses the lengths of prompts and texts of some rows."""
    num_given = max(min(_NUM_GIVEN, max_length // 4), 1)
    num_chunks = num_rows * -(-num_given // PAGE_SIZE)
    num_passes = -(-num_chunks // NUM_CHUNKS)
    num_new = min(_NUM_NEW, max_length - num_given - num_passes - NUM_STEPS)
    return _Case(num_rows, num_given, num_new, num_passes)


def _make_cases(generator: Generator, rows: Sequence[int]) -> list[_Case]:
    """Makes the cases of some numbers of rows, or of 1 and the most that fit."""
    most = [*range(generator.max_rows, 0, -1)]
    found = {x: _make_case(x, generator.max_length) for x in rows or most}
    fits = {
        x: case
        for x, case in found.items()
        if case.num_new >= _LEAST_NEW and case.num_pages < generator.num_pages
    }
    refused = [x for x in rows if x not in fits]
    if refused or not fits:
        problem = f"do not fit with texts of {generator.max_length:,} tokens in "
        problem += f"{generator.num_pages - 1:,} pages of {PAGE_SIZE}"
        remedy = "use fewer, a longer max_length, or free memory"
        wrong = refused or [1]
        raise ConfigError(*(Problem("rows", x, problem, remedy) for x in wrong))
    chosen = rows or sorted({min(fits), max(fits)})
    return [fits[x] for x in chosen]


def _time_case(
    generator: Generator,
    case: _Case,
    num_rounds: int,
    footprint: Footprint,
    bandwidth: float,
) -> RowsSpeed:
    """Times some rounds of a case, after one that warms up."""
    rounds = [_time_round(generator, case, seed) for seed in range(1 + num_rounds)]
    first, token = zip(*rounds[1:], strict=True)
    number = generator.num_shards * case.num_rows
    given = number * case.num_given
    allowed = footprint.step_seconds(case.num_rows, case.mean_length, bandwidth)
    return RowsSpeed(
        num_rows=case.num_rows,
        prompt_tokens_per_second=Spread.of([given / x for x in first]),
        first_token_seconds=Spread.of(first),
        token_seconds=Spread.of(token),
        new_tokens_per_second=Spread.of([number / x for x in token]),
        allowed_seconds=allowed,
        share=allowed / Spread.of(token).median,
    )


def _time_round(generator: Generator, case: _Case, seed: int) -> tuple[float, float]:
    """Returns the seconds to the first token of the last row, and of a later token."""
    # Prompts of other rounds would be found in the cache.
    rng = np.random.default_rng((case.num_rows, seed, time.perf_counter_ns()))
    shape = generator.num_shards * case.num_rows, case.num_given
    prompts = rng.integers(generator.config.vocab_size, size=shape).tolist()
    # Draws repeat less than likely tokens, of which drafts would be right.
    most = {"max_new_tokens": case.max_new_tokens, "end_ids": ()}
    sampling = Sampling(temperature=1.0, seed=seed, **most)
    start = time.perf_counter()
    tickets = [generator.submit(x, sampling, is_streamed=False) for x in prompts]
    # Prompts are read in order: all rows write when the last one does.
    news = iter(tickets[-1])
    next(news)
    first, num_new = time.perf_counter(), 0
    while num_new < case.num_new:
        num_new += len(next(news).ids)
    end = time.perf_counter()
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        collections.deque(ticket, maxlen=0)  # until it has ended
    return first - start, (end - first) / num_new


class _RandomRun:
    """Run whose random weights are made when a generator asks for them.

    Args:
        config: Settings of a run of the built-in decoder.
    """

    def __init__(self, config: Config):
        # Nothing is trained: the optimizer has no state, and weights no copy.
        halves = config.precision.compute_dtype == "bfloat16"
        self.config = dataclasses.replace(
            config,
            precision=dataclasses.replace(
                config.precision, master_dtype="bfloat16" if halves else "float32"
            ),
            optimizer=load_config({}, WITHOUT_MOMENTS).optimizer,
            data=dataclasses.replace(config.data, source="synthetic"),
        )
        self.model, self.mesh = make_model(self.config), make_mesh(config.mesh)

    def decoder(self, state: Any) -> Any:
        """Returns a decoder; the state of the run is dropped, as pages take all."""
        del state
        run = start_run(self.config, self.model, None)
        return run.decoder(run.state)


def _find_bandwidth() -> tuple[float, str]:
    """Bytes per second of the memory of a device, and where the number comes from."""
    known = known_memory(jax.devices()[0].device_kind)
    if known is not None:
        return known.bytes_per_second, "data sheet"
    return measure_bandwidth(), "copy"


@contextlib.contextmanager
def _counted_programs() -> Iterator[list[float]]:
    """Yields a list that grows by the seconds of each program that is compiled."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
