"""Commands `zjax data prepare`, `analyze` and `teach`, and `zjax convert`."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping

import numpy as np
from absl import flags

from zjax import deepspeed
from zjax.cli.commands import SPECIAL_TOKENS, Parser, chat_flag
from zjax.cli.usage import (
    NO_VALUE,
    Command,
    choice,
    flag,
    integer,
    number,
    switch,
    texts,
)
from zjax.config.flags import config_from_flags
from zjax.data import source, store
from zjax.data.analyze import analyze
from zjax.data.examples import LABELS, LAYOUTS, PAIRS, RANKED
from zjax.data.metric_index import Index, index_path
from zjax.data.metrics import METRICS
from zjax.data.prepare import prepare
from zjax.data.taught import MAX_TOP_K
from zjax.deepspeed.sections import config_file, summary, table_rows
from zjax.errors import ConfigError, Problem
from zjax.observe import plot_metrics
from zjax.run.teach import store_outcomes
from zjax.settings import ranges
from zjax.sharding.describe import render_table

MAX_PROCESSES = 1_024
PICTURE = "metrics.png"
TEXTS = "texts"
"""Value of `--examples` for records that are no examples."""
OBJECTIVES = {
    PAIRS: "--config.preference=dpo ",
    RANKED: "--config.preference=reward_model ",
    LABELS: "--config.preference=kto ",
}
"""Flags of a usual objective, by kind of examples."""
_PERCENTILES = (0, 5, 50, 95, 100)


def prepare_data(given: flags.FlagValues) -> None:
    """Turns text into token files."""
    if given.chat == NO_VALUE:
        remedy = "write --chat=CHECKPOINT"
        raise ConfigError(Problem("--chat", "", "has no value", remedy))
    meta = prepare(
        given.input,
        given.output,
        tokenizer=given.tokenizer,
        validation_fraction=given.validation_fraction,
        text_field=given.text_field,
        chat=given.chat,
        examples="" if given.examples == TEXTS else given.examples,
        special_tokens=given.special_tokens,
        skip_broken=given.skip_broken,
    )
    print(f"wrote {given.output} with a vocabulary of {meta.vocab_size}")
    for name, split in meta.splits.items():
        sizes = f"{split.num_tokens:,} tokens in {split.num_documents:,} documents"
        if split.num_examples:
            sizes += f", {split.num_examples:,} examples"
        print(f"{name}: {sizes}")
    if meta.has_answers:
        opened = store.open_store(given.output, "train")
        offsets, ends = opened.offsets, opened.examples
        lengths = np.diff(offsets if ends is None else offsets[ends])
        print(describe_lengths(lengths, "cuts" if ends is None else "leaves out"))
    print(
        "train on it: zjax train --config.data.source=tokens "
        f"{'--config.data.packing=documents ' if meta.has_answers else ''}"
        f"{OBJECTIVES.get(meta.examples, '')}"
        f"{shlex.quote(f'--config.data.path={given.output}')} "
        f"--config.model.vocab_size={meta.vocab_size} --config=FILE"
    )


PREPARE = Command(
    prepare_data,
    "Turns text into token files.",
    "zjax data prepare --input=text.jsonl --output=tokens --tokenizer=bpe:8192",
    (
        flag(
            "input",
            "Text, JSON, Parquet, Arrow, or a folder; may be repeated.",
            [],
            flags.DEFINE_multi_string,
        ),
        flag("output", "Folder to write."),
        flag("tokenizer", "bytes, bpe:SIZE, ids:SIZE or a .json file.", "bytes"),
        flag("text_field", "Field or column with the text.", "text"),
        chat_flag("Checkpoint whose template encodes conversations."),
        choice(
            "examples",
            "What records hold: texts or conversations; or completions of prompts.",
            TEXTS,
            enum_values=(TEXTS, *LAYOUTS),
        ),
        SPECIAL_TOKENS,
        switch("skip_broken", "Leave out records that cannot be used; count them."),
        number("validation_fraction", "Part of the text held out.", 0.01),
    ),
    has_settings=False,
)


def describe_lengths(sizes: np.ndarray, action: str = "cuts") -> str:
    """Describes percentiles of the lengths of conversations, or of whole examples.

    For a choice of `data.length`; `action` says what happens to those too long for it.
    """
    shares = (50, 90, 99, 100)
    found = np.percentile(sizes, shares, method="inverted_cdf").tolist()
    half, most, nearly, longest = (f"{size:,}" for size in found)
    return (
        f"data.length {action} longer ones: 50 % have up to {half} tokens, "
        f"90 % up to {most}, 99 % up to {nearly}, the longest {longest}"
    )


def analyze_data(given: flags.FlagValues) -> None:
    """Measures the training samples of a config, for a curriculum."""
    config = config_from_flags(given)
    if problems := list(ranges.range_problems(config)):
        raise ConfigError(*problems)
    # `--metrics=module:function` may name a module in the working directory.
    sys.path.insert(0, os.getcwd())
    output = given.output
    num_processes = given.num_processes or len(os.sched_getaffinity(0))
    rows = source.open_rows(config, "train")
    digest = source.digest_samples(config.data, rows)
    start = time.monotonic()
    indexes = analyze(
        rows,
        output,
        given.metrics,
        vocab_size=source.make_tokenizer(config).vocab_size,
        digest=digest,
        num_processes=num_processes,
    )
    seconds = time.monotonic() - start
    print(describe_indexes(indexes))
    print(
        f"{len(rows):,} samples in {seconds:.1f} s: {len(rows) / seconds:,.0f} "
        f"samples/s in {num_processes} process{'es' * (num_processes > 1)}"
    )
    picture = os.path.join(output, PICTURE)
    values = {name: index.values for name, index in indexes.items()}
    plot_metrics(values, picture, title=f"{len(rows):,} samples, dataset {digest}")
    print(f"picture: {picture}")
    path = index_path(output, next(iter(indexes)))
    arguments = ", ".join(map(json.dumps, (str(path), digest)))
    code = (
        "from zjax.data.metric_index import open_index; "
        f"print(open_index({arguments}).samples[:9])"
    )
    print(f"the easiest samples: python -c {shlex.quote(code)}")


ANALYZE = Command(
    analyze_data,
    "Measures how difficult samples are, for a curriculum.",
    "zjax data analyze --config=quickstart --output=index",
    (
        texts(
            "metrics",
            f"Some of {', '.join(METRICS)}, module:function.",
            ["seqreo", "voc"],
        ),
        flag("output", "Folder to write."),
        integer(
            "num_processes",
            "Processes; 0 takes one per core.",
            0,
            lower_bound=0,
            upper_bound=MAX_PROCESSES,
        ),
    ),
)


def teach_data(given: flags.FlagValues) -> None:
    """Stores what a teacher says of the training rows, for `distill.teacher`."""
    if not given.output:
        remedy = "name a new directory"
        raise ConfigError(Problem("--output", "", "is missing", remedy))
    config = config_from_flags(given)
    num_rows = store_outcomes(config, given.output, given.top_k, report=print)
    print(f"wrote {given.output}: {given.top_k} outcomes a token of {num_rows:,} rows")
    flag = shlex.quote(f"--config.distill.teacher={given.output}")
    print(f"learn from it: zjax train {flag} --config=FILE")


TEACH = Command(
    teach_data,
    "Stores a teacher's most likely tokens, for distillation without the teacher.",
    "zjax data teach --config=FILE --config.distill.teacher=runs/large \\\n"
    "    --top_k=64 --output=taught",
    (
        integer(
            "top_k",
            "Most likely tokens to store for each token.",
            64,
            lower_bound=1,
            upper_bound=MAX_TOP_K,
        ),
        flag("output", "Directory to write, or to go on with."),
    ),
)


def describe_indexes(indexes: Mapping[str, Index]) -> str:
    """Formats a table of percentiles and distinct values of each metric."""
    columns = ("metric", "min", "5 %", "median", "95 %", "max", "distinct")
    rows = []
    for name, index in indexes.items():
        last = len(index.values) - 1
        shown = [index.values[last * percent // 100] for percent in _PERCENTILES]
        # Values are sorted and may be memory-mapped: slices bound the memory.
        distinct = 1 + sum(
            int((part[1:] != part[:-1]).sum()) for part in _overlapping(index)
        )
        rows.append((name, *(f"{value:,.6g}" for value in shown), f"{distinct:,}"))
    return render_table(columns, rows, right=range(1, len(columns)))


def _overlapping(index: Index, size: int = 1 << 20) -> Iterator[np.ndarray]:
    """Yields slices of the values; each begins with the last value of the previous."""
    for start in range(0, len(index.values), size):
        yield index.values[start : start + size + 1]


def convert_file(given: flags.FlagValues) -> None:
    """Prints the config of a ds_config.json, and on stderr the fate of each key.

    Exits with status 1 if any key is not supported.
    """
    parser = Parser("zjax convert", allow_abbrev=False)
    parser.add_argument("file", help="ds_config.json of DeepSpeed")
    found = deepspeed.read(parser.parse_args(sys.argv[2:]).file)
    print(config_file(found), end="")
    columns = ("key of DeepSpeed", "value", "here", "settings, reason or remedy")
    print(render_table(columns, table_rows(found)), file=sys.stderr)
    print(summary(found), file=sys.stderr)
    for problem in found.problems():
        print(f"zjax: {problem}", file=sys.stderr)
    sys.exit(1 if found.problems() else 0)


CONVERT = Command(
    convert_file,
    "Prints the config of a ds_config.json, and what becomes of each of its keys.",
    "zjax convert ds_config.json > config.py",
    arguments="FILE",
)


def summarise_file(path: str) -> str:
    """Counts the keys of a ds_config.json by result, and names the detailed command."""
    return f"{path}: {summary(deepspeed.read(path))}; each key: zjax convert {path}"
