"""Trainer on examples: completions that were compared or labelled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.data import source
from zjax.data.evaluation import EvaluationSet, evaluate_rows
from zjax.data.example_rows import REFERENCE, ExampleRows, ReferencedRows
from zjax.data.loader import Loader, sample_rows
from zjax.errors import ConfigError, DataError, Problem
from zjax.processes.agreement import check_same
from zjax.rl.divergence_step import DivergenceStep
from zjax.rl.preference_model import preference_model
from zjax.rl.reference_store import (
    compute_sums,
    count_references,
    read_sums,
    write_sums,
)
from zjax.rl.weight_digest import digest_weights
from zjax.run import resume as resumes
from zjax.run import trainer as training
from zjax.run.ending import AfterStep
from zjax.run.monitor import Callback
from zjax.settings import schema
from zjax.settings.preference import Kto
from zjax.typing import Batch, Device, Model

_EXECUTION = (
    *("layers_per_scan", "remat", "activation_memory", "dropout_rate", "z_loss"),
    *("loss_chunk_tokens", "mlp_chunk_tokens", "embedding_dropout_rate"),
    "attention_dropout_rate",
)
"""Settings of a model that do not change log-probabilities."""
_SPLITS = "train", "validation"


class PreferenceTrainer(training.Trainer):
    """Trains a model on compared completions, from the last checkpoint if there is one.

    Where the objective reads a reference, that is the weights which the run starts
    from. Their log-probabilities are computed at the start and stored beside the data,
    so that no second model is in memory; a later run from equal weights reads them.
    Steps, evaluation, checkpoints and logging are as in `zjax.Trainer`.

    Args:
        config: A Config, a mapping, or the path of a config file, with `preference`.
        tx: Optax gradient transformation; the configured optimizer by default.
        step: Step of the checkpoint to start from; 0 for the weights that the run
            starts from. The newest by default.
        callbacks: Functions called as `callback(step, values)` for logged steps.
        after_step: Functions called after every step, as for `zjax.Trainer`.
        devices: Devices to use; all by default.

    Raises:
        ConfigError: Settings that cannot work.
        DataError: Data that is missing, malformed, or not for the objective.
        PlanError: Arrays or an optimizer that cannot be placed.
        CheckpointError: A checkpoint that cannot be read.
    """

    def __init__(
        self,
        config: Any,
        *,
        tx: Any = None,
        step: int | None = None,
        callbacks: Sequence[Callback] = (),
        after_step: Sequence[AfterStep] = (),
        devices: Sequence[Device] | None = None,
    ):
        self._asked, self._options = step, {"tx": tx, "devices": devices}
        self._examples: dict[str, ExampleRows] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._reference = ""
        super().__init__(
            config,
            tx=tx,
            step=step,
            callbacks=callbacks,
            after_step=after_step,
            devices=devices,
        )
        if isinstance(self._objective, Kto):
            step_of = DivergenceStep.of(self.run.step)
            self.run = dataclasses.replace(self.run, step=step_of)

    @property
    def _objective(self) -> Any:
        return self.config.preference

    def _unread(self, config: schema.Config) -> list[Problem]:
        """Lists what the run lacks to compare completions."""
        if config.preference is not None:
            return []
        remedy = "choose an objective, such as dpo, or use zjax.Trainer"
        return [Problem("preference", None, "compares no completions", remedy)]

    def _make_model(self, model: Model | None) -> tuple[Model, Batch | None]:
        """Makes the model, with shapes of a batch; finds the reference of the run."""
        splits = _SPLITS if self.config.evaluation.num_batches else _SPLITS[:1]
        for split in splits:
            rows = source.open_rows(self.config, split)
            assert isinstance(rows, ExampleRows)  # or the data had been refused
            self._examples[split] = rows
        resume = self.config.checkpoint.resume
        start = resumes.first_step(self.store, resume, self._asked)
        if start and self._objective.reads_reference:
            self._find_reference(start)
        return preference_model(self.config), self._example()

    def _example(self) -> Batch:
        """Shapes of a global batch of training rows."""
        read = self._examples["train"].read(np.zeros(1, np.int64))
        if self._objective.reads_reference:
            read[REFERENCE] = np.zeros(read["examples"].shape, np.float32)
        size = self.config.global_batch_size
        return {
            name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
            for name, x in read.items()
        }

    def _find_reference(self, start: int) -> None:
        """Reads the log-probabilities by which the run of a checkpoint began."""
        saved = self.store.extra(start).get("data", {}).get("data.digest", "")
        _, has_reference, self._reference = str(saved).rpartition("-")
        if not has_reference:
            problem = "reads a reference, and the saved run had none"
            remedy = "start a new run, from its weights by checkpoint.init_from"
            kind = self._objective.kind
            raise ConfigError(Problem("preference", kind, problem, remedy))
        if self._read_all():
            return
        # Weights that a run starts from take the place of the state for a while.
        logging.warning("log-probabilities of the reference are computed again")
        type(self)(self.config, step=0, **self._options).close()
        if not self._read_all():
            path = self.config.data.path
            problem = f"lacks log-probabilities of the reference {self._reference}, "
            problem += "and the run starts from other weights now"
            remedy = "restore what checkpoint.init_from names, or start a new run"
            raise DataError(Problem("data.path", path, problem, remedy))

    def _read_all(self) -> bool:
        """Reads stored log-probabilities; returns whether all splits have some."""
        path, reference = self.config.data.path, self._reference
        for split, rows in self._examples.items():
            sums = read_sums(path, split, reference, rows)
            if sums is not None:
                self._sums[split] = sums
        # A process that finds a file would not take part in computing it.
        check_same({"log-probabilities of the reference": sorted(self._sums)})
        return self._sums.keys() == self._examples.keys()

    def _compute_reference(self) -> None:
        """Computes what is not stored of the weights that the run starts from."""
        self._reference = digest_weights(
            self.state, self.run.plan, _settings_of(self.config)
        )
        self._read_all()
        path = self.config.data.path
        for split in self._examples.keys() - self._sums.keys():
            rows = self._examples[split]
            text = "log-probabilities of the reference %s: %s rows of %s are computed%s"
            others = count_references(path, split)
            note = f"; {others} other references are stored" * bool(others)
            say = logging.warning if others else logging.info
            say(text, self._reference, f"{len(rows):,}", split, note)
            self._sums[split] = compute_sums(self.run, self.state, rows)
            if jax.process_index() == 0:
                write_sums(path, split, self._reference, rows, self._sums[split])

    def _rows(self, split: str) -> ExampleRows | ReferencedRows:
        """Rows of a split, with what the objective reads."""
        rows = self._examples[split]
        if not self._objective.reads_reference:
            return rows
        return ReferencedRows(rows, self._sums[split], self._reference)

    def _make_loader(self) -> Loader:
        """Makes the loader of examples, once the reference is known."""
        if self._objective.reads_reference and not self._reference:
            self._compute_reference()
        config = self.config
        loader = sample_rows(
            self._rows("train"),
            config.data,
            self.run.batch_placement,
            seed=config.seed,
            batch_size=config.global_batch_size,
            position=source.row_settings(config.data),
        )
        check_same(loader.state())
        return loader

    def _find_evaluation(self, batches: Any) -> EvaluationSet | None:
        """Finds the held-out examples."""
        number = self.config.evaluation.num_batches
        if not number:
            return None
        return evaluate_rows(
            self._rows("validation"),
            self.config.data,
            self.run.batch_placement,
            number,
            self.config.global_batch_size,
        )


def _settings_of(config: schema.Config) -> str:
    """Describes the settings that log-probabilities depend on."""
    usual = schema.Model()
    changes = {name: getattr(usual, name) for name in _EXECUTION}
    precision = config.precision
    model = dataclasses.replace(config.model, **changes)
    return f"{model} {precision.compute_dtype} {precision.matmul_dtype}"
