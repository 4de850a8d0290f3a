"""Exports the weights of a run as a GGUF file, with metadata and vocabulary."""

import pathlib
import tempfile
from typing import Any

from absl import logging

from zjax.checkpoint import learned
from zjax.checkpoint.export import check_learned, find_start
from zjax.checkpoint.start import open_weights
from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import tokenizer_of_run, write_tokenizer
from zjax.config.load import saved_config
from zjax.data.gguf_vocabulary import vocabulary_of
from zjax.data.tokenizer import load_tokenizer
from zjax.data.tokenizer_files import TOKENIZER_NAME
from zjax.errors import ConfigError, Problem
from zjax.files import new_file
from zjax.weights import gguf_file, gguf_names, huggingface
from zjax.weights.files import writable
from zjax.weights.source import Entry, Source

_NUM_SHOWN = 3


def export_gguf(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
    quantize: str = "f16",
) -> int:
    """Writes one file that llama.cpp runs, with the tokenizer of the run's data.

    `quantize` is one of `gguf_file.TYPES`; types of another grid than a run with
    rounded matrices learned are refused. The file is renamed once complete. Only one
    process may call this.
    """
    chosen = store.resolve(step)
    if dtype:
        problem, remedy = "has no effect with --format=gguf", "use --quantize"
        raise ConfigError(Problem("--dtype", dtype, problem, remedy))
    if quantize not in gguf_file.FLOATS:
        check_learned(store, chosen, quantize, learned.GGUF)
    source, _ = open_weights(store, part, chosen, rounds=True)
    return write_gguf(store, path, source, step=chosen, quantize=quantize)


def write_gguf(
    store: Store,
    path: str,
    source: Source,
    *,
    step: int,
    quantize: str = "f16",
    scales: Source | None = None,
) -> int:
    """Writes given weights of a run's model as `export_gguf` does.

    `source` has arrays by path in the model. `scales`, with the same names and shapes,
    has the scales of weights that lie on the grid of `quantize` already.
    """
    config = saved_config(store.extra(step))
    model = config.model
    kind = huggingface.find_kind(model, "use --format=safetensors")
    values = huggingface.config_of(model, kind)
    architecture = gguf_names.architecture_of(model, kind, values)
    huggingface.report_dropouts(model, kind)
    metadata = {
        f"{architecture.name}.{name}": value
        for name, value in gguf_names.metadata_of(model, architecture, values).items()
    }
    metadata |= _vocabulary(store, step, model.vocab_size, config.checkpoint.init_from)

    def stored(plain: Source) -> Source:
        named = huggingface.model_tensors(plain, model, kind, str(store.directory))
        return gguf_names.to_gguf(named, model, kind)

    tensors = _with_factors(
        stored(source), gguf_names.rotation_factors(model, architecture)
    )
    _report(tensors, quantize)
    target = pathlib.Path(path)
    given = None if scales is None else _with_factors(stored(scales), {})
    with writable(path), new_file(target) as partial:
        gguf_file.write(partial, architecture.name, metadata, tensors, quantize, given)
    return target.stat().st_size


def _with_factors(source: Source, factors: dict[str, Any]) -> Source:
    """Adds the tensor of frequencies, if there is one."""
    entries = {name: Entry(x.shape, "float32") for name, x in factors.items()}
    return source.joined(Source(entries, lambda name, index: factors[name][index]))


def _vocabulary(
    store: Store, step: int, vocab_size: int, init_from: str
) -> dict[str, Any]:
    """Metadata of the tokenizer; a run on numbers has none, which the log says."""
    trained = tokenizer_of_run(store, step)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tokenizer(folder, trained, find_start(init_from))
        path = folder / TOKENIZER_NAME
        if path.exists():
            record = trained.record or load_tokenizer(path).record
            return vocabulary_of(folder, record, vocab_size)
    logging.warning("tokenizer: the export has none, and runs on token ids alone")
    return {"tokenizer.ggml.model": "none"}


def _report(tensors: Source, quantize: str) -> None:
    """Logs how many matrices are codes, and which widths made a matrix float16."""
    types = {
        n: gguf_file.type_of(n, x.shape, quantize) for n, x in tensors.entries.items()
    }
    count = sum(x == quantize for x in types.values())
    wide = [
        name
        for name, x in types.items()
        if x == "f16" and name not in gguf_file.PLAIN and quantize != "f16"
    ]
    text = f"--quantize={quantize}: {count} tensors"
    if wide:
        more = len(wide) - _NUM_SHOWN
        names = ", ".join(wide[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
        text += f"; f16, as 32 does not divide their inputs: {names}"
    logging.warning("%s", text)
