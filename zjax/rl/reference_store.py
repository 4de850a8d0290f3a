"""Log-probabilities of a reference model, computed once and stored beside the data.

The file of a split is named by the digest of the reference, and holds the digest of the
data: log-probabilities of other weights or other completions are never read.
"""

import pathlib

import numpy as np
from absl import logging
from jaxtyping import Float64

from zjax.data.example_rows import EXAMPLES, REFERENCE, ExampleRows
from zjax.data.metric_index import open_columns, write_columns
from zjax.data.placement import place_batch
from zjax.errors import DataError, Problem
from zjax.rl.policy import logprobs_of
from zjax.run.build import Run
from zjax.train.state import TrainState
from zjax.typing import IGNORED

Sums = Float64[np.ndarray, " documents"]


def reference_path(path: str, split: str, reference: str) -> pathlib.Path:
    """Path of the log-probabilities of a split, beside the data in `path`."""
    return pathlib.Path(path) / f"{split}.reference-{reference}"


def count_references(path: str, split: str) -> int:
    """Counts the references of which log-probabilities of a split are stored."""
    return len([*pathlib.Path(path).glob(f"{split}.reference-*")])


def read_sums(path: str, split: str, reference: str, rows: ExampleRows) -> Sums | None:
    """Reads the log-probability of each document; None where they must be computed.

    A warning tells why a file that is there cannot be used.

    Args:
        path: Directory of the data.
        split: Name of the split.
        reference: Digest of the reference model.
        rows: Rows that read the log-probabilities.
    """
    file = reference_path(path, split, reference)
    if not file.exists():
        return None
    try:
        remedy = "they are computed again"
        opened = open_columns(file, ["<f8"], field="data.path", remedy=remedy)
    except DataError as error:
        logging.warning("log-probabilities of the reference: %s", error)
        return None
    [sums] = opened.arrays
    reason = ""
    if opened.digest != reference + rows.digest():
        reason = "were computed of other completions"
    elif len(sums) < len(rows.opened.offsets) - 1 or _lacks(sums, rows):
        reason = "lack examples that fit into the rows now"
    if reason:
        text = "log-probabilities of the reference %s %s, and are computed again"
        logging.warning(text, file, reason)
        return None
    return np.array(sums)


def write_sums(
    path: str, split: str, reference: str, rows: ExampleRows, sums: Sums
) -> None:
    """Writes log-probabilities of documents; the file appears when it is complete."""
    file = reference_path(path, split, reference)
    try:
        write_columns(file, [sums], digest=reference + rows.digest(), name=split)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "copy the data to a folder where files can be written, with room"
        raise DataError(Problem("data.path", str(file), problem, remedy)) from error


def compute_sums(run: Run, state: TrainState, rows: ExampleRows) -> Sums:
    """Sums the log-probability of each completion, by the weights of a state.

    Args:
        run: Run of a model that learns from the rows.
        state: State with the weights of the reference; not consumed.
        rows: Rows of examples.

    Returns:
        Log-probability of the completion of each document, NaN where no row has it.
    """
    sums = np.full(len(rows.opened.offsets) - 1, np.nan)
    size = run.config.global_batch_size
    for start in range(0, len(rows), size):
        # The last rows are read again to fill the batch.
        indices = np.minimum(np.arange(start, start + size), len(rows) - 1)
        batch, documents = rows.read(indices), rows.documents(indices)
        is_counted = batch["weights"] > 0
        batch["targets"] = np.where(is_counted, batch["targets"], IGNORED)
        batch[REFERENCE] = np.zeros(documents.shape, np.float32)
        placed = place_batch(batch, run.batch_placement, size, "reference")
        logprobs = np.asarray(logprobs_of(run, state, placed), np.float64)
        for row, numbers in enumerate(documents):
            by_segment = np.bincount(batch["segment_ids"][row], logprobs[row])
            is_real = numbers >= 0
            sums[numbers[is_real]] = by_segment[batch[EXAMPLES][row][is_real]]
    return sums


def _lacks(sums: Sums, rows: ExampleRows) -> bool:
    """Whether a row has a document without log-probability."""
    documents = rows.documents(np.arange(len(rows)))
    return bool(np.isnan(sums[documents[documents >= 0]]).any())
