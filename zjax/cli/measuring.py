"""Command that measures a config, generation, or disks: `zjax bench`."""

import dataclasses

from absl import flags

from zjax.cli import commands
from zjax.cli.connection import connected
from zjax.cli.usage import Command, switch, texts
from zjax.config.flags import config_from_flags, refuse_flags, settings_given
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.generation.dtypes import Dtypes
from zjax.processes.programs import result_line
from zjax.run.bench import describe_measurement, measure
from zjax.run.disks import describe_disks, measure_disks
from zjax.run.generation_bench import describe_generation, measure_generation

GENERATION = "model", "rows", "max_length", *commands.DTYPES_STORED
"""Flags that are read with `--generate` alone."""


def bench(given: flags.FlagValues) -> None:
    """Measures a step of a config, generation with a config, or disks."""
    if not given.generate:
        refuse_flags(given, GENERATION, "has no effect without --generate")
    if given.nvme:
        names = ["generate", *settings_given(given)]
        refuse_flags(given, names, "has no effect with --nvme")
        disks = [local_path("nvme", path) for path in given.nvme]
        speed = measure_disks(tuple(disks))
        print(describe_disks(speed))
        print(result_line(dataclasses.asdict(speed)))
        return
    if given.generate:
        bench_generation(given)
        return
    config = config_from_flags(given)
    with connected(config) as info:
        measurement = measure(config)
        if info.process_id == 0:
            print(describe_measurement(measurement))
            print(result_line(dataclasses.asdict(measurement)))


def bench_generation(given: flags.FlagValues) -> None:
    """Measures generation with random weights of a config, or with a checkpoint."""
    rows = read_rows(given.rows)
    config = commands.generating_settings(given)
    with connected(config) as info:
        speed = measure_generation(
            config,
            model=given.model and local_path("model", given.model),
            rows=rows,
            max_length=given.max_length,
            dtypes=Dtypes(given.weight_dtype, given.cache_dtype),
        )
        if info.process_id == 0:
            print(describe_generation(speed))
            print(result_line(dataclasses.asdict(speed)))


def read_rows(given: list[str]) -> tuple[int, ...]:
    """Reads numbers of rows, in rising order."""
    wrong = [x for x in given if not (x.isascii() and x.isdigit())]
    if wrong:
        problem, remedy = "is no number of rows", "use numbers, such as 1,16,64"
        raise ConfigError(*(Problem("--rows", x, problem, remedy) for x in wrong))
    return tuple(sorted({int(x) for x in given}))


BENCH = Command(
    bench,
    "Measures how fast a config is here, or generation, or disks.",
    "zjax bench --config=quickstart\n"
    "zjax bench --generate --config=quickstart --rows=1,16\n"
    "zjax bench --nvme=/mnt/a,/mnt/b",
    (
        texts("nvme", "Directories on disks; measures these for offload.", []),
        switch("generate", "Measures generation, in place of training steps."),
        commands.MODEL,
        texts(
            "rows",
            "Texts at once, such as 1,16,64; 1, and 64 or as many as fit, by default.",
            [],
        ),
        commands.MAX_LENGTH,
        commands.WEIGHT_DTYPE,
        commands.CACHE_DTYPE,
    ),
)
