"""Trains a model from settings: data, steps, evaluation, checkpoints and logging."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zjax import data
from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import check_start, keep_tokenizer
from zjax.config.load import load_beside
from zjax.data.prompts import Given
from zjax.data.tokenizer_files import KEY as TOKENIZER
from zjax.errors import ConfigError, DataError, Problem
from zjax.models.build import make_model
from zjax.observe.history import check_directory
from zjax.observe.progress import RESUME
from zjax.processes.agreement import check_same
from zjax.processes.member_files import hold
from zjax.replicas.state import saved_rows, saved_state
from zjax.run import ending
from zjax.run import resume as resumes
from zjax.run.batch import end_by_epochs
from zjax.run.build import start_run, unread_schedule
from zjax.run.compiler import CompileAhead
from zjax.run.ending import KEY as PATIENCE
from zjax.run.ending import REMEDY as PATIENCE_REMEDY
from zjax.run.fit import explain_out_of_memory
from zjax.run.monitor import Callback, Monitor
from zjax.run.nonfinite import find_nonfinite, report_nonfinite
from zjax.run.pinned_pool import limit_pinned_pool
from zjax.run.trainer_settings import (
    checked_settings,
    describe_start,
    is_of_settings,
    read_elsewhere,
    unread_loss,
)
from zjax.run.writer import Writer
from zjax.schedule.training import TrainingSchedule
from zjax.settings.schema import Config
from zjax.train.average import check_average, with_part
from zjax.train.state import TrainState
from zjax.train.update import Schedule
from zjax.typing import Batch, Device, Model


class Trainer:
    """Trains a model as configured, from the last checkpoint if there is one.

    Args:
        config: A Config, a mapping, or the path of a config file.
        model: `zjax.Model`, such as `zjax.adapt` makes; the built-in model by default.
            A decoder of `zjax.make_model(config)`, changed by `zjax.with_stack`, trains
            on the configured data, too.
        tx: Optax gradient transformation, as for `zjax.initialize`; the configured
            optimizer by default.
        loss_fn: Always None; `zjax.adapt` joins a loss and a Flax module to a `model`.
        schedule: Learning rate of `tx` by applied step, for the log.
        batches: Training data: a dataset with columns, a list of rows, or an iterable
            of batches (see `zjax.wrap_batches`); the configured data by default.
        evaluation_batches: Evaluation data; none if only `batches` is given.
        step: Step of the checkpoint to start from, for evaluation or generation, which
            may read other data; 0 for the weights of `checkpoint.init_from`. The newest
            by default; `fit` refuses earlier checkpoints.
        callbacks: Functions called as `callback(step, values)` for logged steps.
        after_step: Functions called as `f(step, state, batch, metrics)` after every
            step, in every process; they may return "save" or "stop" (see
            `zjax.AfterStep`).
        devices: Devices to use; all by default.

    Raises:
        ConfigError: Settings that cannot work.
        PlanError: Arrays or an optimizer that cannot be placed.
        DataError: Data that is missing or malformed.
        CheckpointError: A checkpoint that cannot be read.
        ProcessError: Processes of the run differ in settings or data.
    """

    def __init__(
        self,
        config: Any,
        *,
        model: Model | None = None,
        tx: Any = None,
        loss_fn: Any = None,
        schedule: Schedule | None = None,
        batches: Any = None,
        evaluation_batches: Any = None,
        step: int | None = None,
        callbacks: Sequence[Callback] = (),
        after_step: Sequence[ending.AfterStep] = (),
        devices: Sequence[Device] | None = None,
    ):
        config = load_beside(tx, config)
        if model is None:
            limit_pinned_pool(config)  # before JAX starts its devices
        devices = jax.devices() if devices is None else devices
        if problems := [*unread_loss(loss_fn), *unread_schedule(tx, schedule)]:
            raise ConfigError(*problems)
        config, self._epochs = end_by_epochs(config, batches, len(devices))
        self.config = checked_settings(
            config,
            model,
            tx,
            batches,
            evaluation_batches,
            devices,
            others=self._unread(config),
        )
        self._batches = batches
        self._is_language_model = is_of_settings(model, self.config)
        self._callbacks, self._after_step = callbacks, after_step
        # absolute: the program may change its working directory before or during fit
        self._directory = pathlib.Path(self.config.directory).absolute()
        settings = self.config.checkpoint
        self.store = Store(
            str(self._directory / "checkpoints"),
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
        )
        start = resumes.first_step(self.store, settings.resume, step)
        if not start and batches is None:
            starts = {"checkpoint.init_from": settings.init_from}
            if self.config.distill:
                starts["distill.teacher"] = self.config.distill.teacher
            check_start(starts, self.config.data, self.config.model.vocab_size)
        if step is None:
            check_directory(str(self._directory))
        if start:
            saved = self.store.extra(start)
            resumes.report_changes(saved, self.config, start)
            self._check_saved(saved, start)
        model, batch = self._make_model(model)
        self.run = start_run(
            self.config,
            model,
            tx,
            schedule=schedule,
            devices=devices,
            restore=self._restore(start) if start else None,
            batch=batch,
        )
        self.state: TrainState = self.run.state
        extra = self.store.extra(start) if start else {}
        text = self.config.data, self.config.model.vocab_size
        self._tokenizer = None if batches is not None else data.read_record(*text)
        if self._tokenizer is not None:
            resumes.check_tokenizer(extra, self._tokenizer, self.config)
        self.loader = self._make_loader()
        self._schedule = TrainingSchedule(
            self.config, self.run.mesh.size, self.loader.shape_at
        )
        stopping = self.config.evaluation.early_stopping
        self._patience = ending.Patience(stopping)
        self._position: Any = None
        """Position of the loader from a checkpoint, until the loader moves there."""
        if start:
            resumes.report_functions(extra, self.run.functions)
            self._position = extra.get("data", {})
            if step is None:
                self._move_loader()
            self._patience = ending.Patience(stopping, extra.get(PATIENCE))
        self._evaluation = self._find_evaluation(evaluation_batches)
        if self._evaluation:
            check_average(self.state, self.run.plan)
        self._writer = Writer(
            self.config, self.run, writes_text=self._is_language_model
        )
        self.exit_status = 0
        self._is_stopped: Callable[[], bool] = lambda: False
        """Whether a signal asks this process to end the run."""
        self._last_evaluation = -1, 0.0
        """Step and loss of the newest evaluation."""

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return int(self.state.step)

    def fit(self) -> TrainState:
        """Trains to `num_steps` or until a stop signal; saves in either case.

        Afterwards `exit_status` is 0 if all steps were taken, or if early stopping or
        a function of `after_step` ended the run; else 128 plus the number of the
        signal: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP.

        Returns:
            The last state.

        Raises:
            NonFiniteError: A step was not finite and the policy is to stop.
            CheckpointError: A checkpoint could not be written.
            DataError: The data ended or is malformed.
            OutputError: A file of the run could not be written; the run is saved.
            PlanError: A step needs more memory than the devices have.
            ProcessError: Another run writes into the directory.
        """
        check_directory(str(self._directory))
        with hold(str(self._directory)):
            return self._fit()

    def _fit(self) -> TrainState:
        """Trains under the lock of the directory."""
        config, step = self.config, self.step
        resumes.check_newest(self.store, step)
        self._move_loader()
        if self._tokenizer is not None and jax.process_index() == 0:
            keep_tokenizer(config.data, self.store.directory)
        monitor = self._monitor()
        if config.checkpoint.every_steps:
            self.store.prepare(saved_rows(self.run.plan, config))
        user_model = not self._is_language_model
        memory_errors = explain_out_of_memory(
            config, self.run.plan, user_model=user_model
        )
        unfinished_save = ending.finish_save_on_error(self.store)
        known = set[str]()
        recent = dict[int, Any]()  # batches of two steps: metrics arrive one step late

        def find_causes() -> list[Problem]:
            number = monitor.known_step
            return find_nonfinite(self.run.step, self.state, recent[number], number)

        nonfinite_errors = report_nonfinite(find_causes)
        with (
            memory_errors,
            unfinished_save,
            nonfinite_errors,
            ending.stop_signals() as stopped,
            monitor,
            self.loader,
            CompileAhead(self._schedule, self._compile, step + 1) as ahead,
        ):
            self._is_stopped = stopped.is_requested
            last_saved, data_ended, save_due = step, False, False
            reason = self._patience.reason
            while step < config.num_steps and not reason and not stopped(step):
                batch = next(self.loader, None)
                if batch is None:
                    data_ended = not stopped.is_requested()
                    break
                # One process may fail alone; the request makes all processes stop
                # together.
                if self.store.has_failed() or monitor.has_failed:
                    stopped.request()  # stops all processes at one step
                step += 1
                recent = {step - 1: recent.get(step - 1), step: batch}
                names = self._schedule.at(step).exchange.programs
                programs = [name for name in names if name not in known]
                known.update(programs)
                if ahead.started(step):
                    with monitor.pause():
                        ahead.wait(step)
                with monitor.step(step, self.state, batch, programs) as metrics:
                    self.state, values = self.run.step(self.state, batch)
                    metrics.append(values)
                # The step runs on the devices meanwhile: the host compiles in its
                # shadow.
                ahead.after(step, batch)
                asked = ending.ask_all(
                    self._after_step, step, self.state, batch, values
                )
                if "stop" in asked:
                    reason = f"{asked['stop']} asked for it"
                is_last = step == config.num_steps
                save_due |= is_last or "save" in asked
                save_due |= _is_due(step, config.checkpoint.every_steps)
                is_evaluated = is_last or _is_due(step, config.evaluation.every_steps)
                if save_due or (is_evaluated and self._saves_best):
                    self._settle()  # a checkpoint stores settled weights: evaluate them
                if is_evaluated:
                    with monitor.pause():
                        monitor.log(step, self.evaluate())
                    save_due |= self._count_evaluation(step) and self._saves_best
                    reason = reason or self._patience.reason
                if save_due:
                    with monitor.pause():
                        # Weights whose steps are skipped would push out good
                        # checkpoints of keep_last.
                        if is_last or not monitor.skipped_in_a_row:
                            self.save()
                            last_saved, save_due = step, False
            with monitor.pause():
                if last_saved != step:
                    self.save()
                self.store.wait()
        if data_ended:
            # The state is saved by now: only then may the error end the run.
            raise self._end_of_batches()
        is_over = step >= config.num_steps or reason
        self.exit_status = 0 if is_over else stopped.exit_status
        self._print_end(monitor, reason)
        return self.state

    def _end_of_batches(self) -> DataError:
        """Makes the error of a run whose batches end too early."""
        remedy = f"give more, or set num_steps={self.step}; the run is saved"
        problem = f"end after step {self.step} of num_steps={self.config.num_steps}"
        return DataError(Problem("batches", "given", problem, remedy))

    def _compile(self, batch: Any, program: str, number: int) -> None:
        self.run.step.compile(batch, program, number)

    def _monitor(self) -> Monitor:
        """Makes the monitor that logs steps from the current step on."""
        return Monitor(
            dataclasses.replace(self.config, directory=str(self._directory)),
            self.run.model,
            last_step=self.step,
            num_skipped=int(self.state.num_skipped),
            has_tokens=self._counts_tokens,
            num_devices=self.run.mesh.size,
            schedule=self._schedule,
            callbacks=self._callbacks,
            values_at=self.loader.values_at,
            beside=self._skipped_beside,
        )

    @property
    def _skipped_beside(self) -> dict[str, int]:
        """Skipped steps of models beside the run's, by the prefix of metric names."""
        return {}

    def _print_end(self, monitor: Monitor, reason: str) -> None:
        """Prints how the run ended, and how it goes on."""
        resume = PATIENCE_REMEDY if self._patience.reason else RESUME
        latest = self.store.latest()
        saved_at = None if latest is None else self.store.path(latest)
        skipped = int(self.state.num_skipped)
        monitor.print_end(self.step, skipped, saved_at, reason, resume)

    def evaluate(self, part: str = "auto") -> dict[str, float]:
        """Averages loss and metrics over the evaluation set, counting each row once.

        Rows count equally, or by the weights that the loss returns. A partial last
        batch is filled by repeated rows, which changes no mean over rows; a loss that
        couples rows needs a set of full batches.

        Args:
            part: Weights to evaluate: `raw`, `ema` or `schedule_free`; `auto` prefers
                averaged weights.

        Returns:
            `eval_loss`, `eval_<metric>` and `evaluated_rows`; empty without evaluation
            data, NaN if no row has weight.

        Raises:
            DataError: The evaluation data is empty or malformed.
            ConfigError: The run has no such weights.
        """
        if self._evaluation is None:
            return {}
        state = with_part(self.state, part)
        values = self._evaluation.mean(lambda batch: self.run.evaluate(state, batch))
        if part == "auto":
            self._last_evaluation = self.step, values["eval_loss"]
        return values

    @property
    def _saves_best(self) -> bool:
        """Whether a run with early stopping stores the best evaluation's weights."""
        stopping = self.config.evaluation.early_stopping
        return bool(stopping and self.config.checkpoint.keep_best)

    def _count_evaluation(self, step: int) -> bool:
        """Counts the evaluation of a step; returns whether no loss was lower yet."""
        evaluated, loss = self._last_evaluation
        return evaluated == step and self._patience.count(step, loss)

    def save(self) -> None:
        """Starts to write a checkpoint of the run at the current step.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written.
        """
        self._move_loader()
        extra = {"data": self.loader.state(), PATIENCE: self._patience.state()}
        step, loss = self._last_evaluation
        loss = loss if step == self.step else None
        self._settle()
        config, plan = self.config, self.run.plan
        rows = saved_rows(plan, config)
        extra |= resumes.describe_run(config, plan, rows, self.run.functions, self.step)
        if self._tokenizer is not None:
            extra[TOKENIZER] = self._tokenizer.to_mapping()
        saved, plans = self._saved(saved_state(self.state, plan), rows)
        self.store.save(self.step, saved, plans, extra=extra, loss=loss)

    def _saved(self, state: TrainState, rows: TrainState) -> tuple[Any, Any]:
        """Returns the arrays of a checkpoint, and plans in that form."""
        return state, rows

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray = "",
        *,
        messages: Any = None,
        chat: str = "",
        special_tokens: bool = False,
        max_new_tokens: int = 0,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 0,
        part: str = "auto",
    ) -> str:
        """Continues a text, or answers messages, with the built-in decoder.

        The text ends at the first end token of the tokenizer.

        Args:
            prompt: Text of one token or more, or token ids.
            messages: Conversation to answer in place of a prompt, through the chat
                template: dicts with `role` and `content`, or a record with `messages`,
                `tools` and the like.
            chat: Directory of a checkpoint with the chat template; by default the
                template prepared with the data.
            special_tokens: Whether names of special tokens in `prompt` are encoded as
                special tokens instead of text.
            max_new_tokens: Number of tokens to add; 0 fills `model.max_length`, or
                after a longer prompt `model.positions.max_positions`.
            temperature: Softmax temperature; 0 takes the most likely token.
            top_k: Number of most likely tokens to sample from; 0 for all.
            top_p: Probability mass of the most likely tokens to sample from.
            seed: Seed of the sampling.
            part: Weights, as for `evaluate`.

        Returns:
            The text and the continuation; after messages or ids the continuation alone.

        Raises:
            ConfigError: The prompt is empty or too long, the run has no such weights,
                or the data has no chat template.
            DataError: The template refuses the messages.
        """
        return self._writer.generate(
            with_part(self.state, part),
            prompt,
            messages=messages,
            chat=chat,
            special_tokens=special_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )

    def encode_prompts(
        self, given: Sequence[Given], *, chat: str = "", special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Encodes prompts for `generate`; one error names all unusable prompts.

        Args:
            given: Texts, ids, or conversations of `zjax.data.conversations`.
            chat: As for `generate`.
            special_tokens: As for `generate`.

        Returns:
            Token ids of each prompt, int32[L].

        Raises:
            ConfigError: Prompts that are empty or too long.
            DataError: The template refuses a conversation.
        """
        return self._writer.encode(given, chat=chat, special_tokens=special_tokens)

    def close(self) -> None:
        """Waits for the last checkpoint and ends all threads.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        self.loader.close()
        self.store.close()

    def describe(self) -> str:
        """Describes the run: plan, dtypes, batch sizes and first step.

        Returns:
            Text of at most 100 columns.
        """
        evaluation = self._evaluation.description if self._evaluation else ""
        notes = self._epochs, self.loader.description
        return describe_start(self.run, self.state, notes, evaluation)

    @property
    def _counts_tokens(self) -> bool:
        """Whether batches have as many tokens as the schedule says."""
        return self._is_language_model

    def _unread(self, config: Config) -> list[Problem]:
        """Lists settings that another trainer reads."""
        return read_elsewhere(config)

    def _make_model(self, model: Model | None) -> tuple[Model, Batch | None]:
        """Makes the model of the run, with a batch if it is not of tokens alone."""
        return make_model(self.config) if model is None else model, None

    def _find_evaluation(self, batches: Any) -> data.EvaluationSet | None:
        """Finds the evaluation data, in `batches` or as configured."""
        placement = self.run.batch_placement
        return data.find_evaluation(self.config, placement, self._batches, batches)

    def _move_loader(self) -> None:
        """Moves the loader to the position of the checkpoint, once.

        If the user named a step, the move waits until `fit` or `save`: evaluation and
        generation may read different data than the run.
        """
        if self._position is not None:
            self.loader.set_state(self._position)
            self._position = None

    def _settle(self) -> None:
        """Applies a pending gradient, if a delayed update left one."""
        if self.state.pending:
            self.state = self.run.step.settle(self.state)

    def _check_saved(self, saved: Mapping[str, Any], step: int) -> None:
        """Refuses settings with which a run cannot go on from a checkpoint."""
        resumes.check_messages(saved, self.config, step)

    def _restore(self, step: int) -> Callable[[TrainState], TrainState]:
        """Returns a function from plans of arrays to the state of step `step`."""

        def read(rows: TrainState) -> TrainState:
            fit = functools.partial(resumes.errors_fit, rows, self.config)
            given = {"keeps_errors": fit, "select": self._selected}
            return self.store.restore(rows, step, **given)[0]

        return read

    def _selected(self, saved: Any) -> Any:
        """Selects the arrays of the state of the run in a checkpoint."""
        return saved

    def _make_loader(self) -> data.Batches:
        """Makes the loader of the user's batches or of the configured data."""
        shardings = self.run.batch_placement
        if self._batches is not None:
            return data.wrap_batches(self._batches, self.config, shardings)
        loader = data.make_loader(self.config, shardings)
        check_same(loader.state())
        return loader


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
