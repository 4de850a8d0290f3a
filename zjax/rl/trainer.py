"""Trainer of reinforcement learning: rollout and update in turn on the same arrays."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from zjax.data.evaluation import EvaluationSet
from zjax.data.prompts import Prompts, make_prompts
from zjax.errors import DataError, Problem
from zjax.generation.sampling import Sampling
from zjax.processes.agreement import check_same
from zjax.rl.critic_run import PREFIX, Critic, CriticStep, check_models, of_policy
from zjax.rl.groups import Experience
from zjax.rl.judges import Judges, check_judges
from zjax.rl.minibatches import Minibatches
from zjax.rl.packing import Packed
from zjax.rl.placing import place_whole
from zjax.rl.policy import policy_model, sizes_of_experts
from zjax.rl.pretraining import KEY, Pretraining
from zjax.rl.prompts import PromptSet, read_rows
from zjax.rl.recipes import (
    aggregation_of,
    make_groups,
    make_objective,
)
from zjax.rl.report import pass_rates, write_samples
from zjax.rl.rollouts import Rollout
from zjax.rl.sampler import Sampler
from zjax.rl.speed import Speed
from zjax.rl.stopping import RolloutStopped, Stopped, never
from zjax.rl.targets import TokenTargets
from zjax.rl.updates import Update, Updates
from zjax.run import trainer as training
from zjax.run.ending import AfterStep
from zjax.run.monitor import Callback
from zjax.settings import rl
from zjax.settings.mappings import leaves, to_mapping
from zjax.settings.schema import Config
from zjax.train.state import TrainState
from zjax.typing import Batch, Device, Model

Rows = Iterable[Mapping[str, Any]]
"""Records with a `prompt` or `messages`, and fields for the reward functions."""
_MOST_TRUNCATED = 3
"""Rollouts in a row of which nothing can be learned, before the run ends."""


class Trainer(training.Trainer):
    """Learns from rewards of a run's own texts, from the last checkpoint if any.

    Rollout and update take turns on the same devices and arrays: texts are drawn with
    the weights of the state, scored, packed and learned from; the memory of generation
    is free during the update. Checkpoints, logging, signals and the end of the run are
    as in `zjax.Trainer`.

    Args:
        config: A Config, a mapping, or the path of a config file, with `rl`.
        prompts: Records with a `prompt`, a text, or `messages`, a conversation; further
            fields are keyword arguments of the reward functions. `rl.prompts` by
            default.
        evaluation_prompts: Records of held-out prompts; `rl.evaluation_prompts` by
            default.
        tx: Optax gradient transformation; the configured optimizer by default.
        step: Step of the checkpoint to start from; the newest by default.
        callbacks: Functions called as `callback(step, values)` for logged steps.
        after_step: Functions called after every step, as for `zjax.Trainer`.
        devices: Devices to use; all by default.

    Raises:
        ConfigError: Settings that cannot work, or prompts that are too long.
        DataError: Prompts that are missing or malformed.
        PlanError: Arrays or an optimizer that cannot be placed.
        CheckpointError: A checkpoint that cannot be read, or a reward model that does
            not fit the policy.
    """

    loader: Updates

    def __init__(
        self,
        config: Any,
        *,
        prompts: Rows | None = None,
        evaluation_prompts: Rows | None = None,
        tx: Any = None,
        step: int | None = None,
        callbacks: Sequence[Callback] = (),
        after_step: Sequence[AfterStep] = (),
        devices: Sequence[Device] | None = None,
    ):
        self._given = prompts, evaluation_prompts
        self._options = {"tx": tx, "devices": devices}
        self._critic: Critic | None = None
        self._pretraining: Pretraining | None = None
        super().__init__(
            config,
            tx=tx,
            step=step,
            callbacks=callbacks,
            after_step=after_step,
            devices=devices,
        )

    def _unread(self, config: Config) -> list[Problem]:
        """Lists what the run lacks to learn from texts."""
        if config.rl is None:
            remedy = "set rl.objective, or use zjax train"
            return [Problem("rl", None, "says nothing of texts or rewards", remedy)]
        problems = []
        if not config.rl.prompts and self._given[0] is None:
            problem, remedy = "names no prompts", "give a file of JSON Lines"
            problems.append(Problem("rl.prompts", "", problem, remedy))
        if not config.rl.rewards:
            remedy = "name functions, such as 'zjax.rl.tasks.sums:reward'"
            problem = "gives texts no reward"
            problems.append(Problem("rl.rewards", (), problem, remedy))
        return problems

    @property
    def _settings(self) -> rl.Rl:
        assert self.config.rl is not None  # `_unread` refuses None
        return self.config.rl

    @property
    def _stopped(self) -> Stopped:
        """Function that tells whether to drop the rollout in flight."""
        # Processes hear of a signal at different moments, and have to run equal passes.
        return self._is_stopped if jax.process_count() == 1 else never

    def _check_saved(self, saved: Mapping[str, Any], step: int) -> None:
        """Refuses another objective or critic if these learn other models."""
        super()._check_saved(saved, step)
        check_models(saved, self.config)

    def _make_model(self, model: Model | None) -> tuple[Model, Batch | None]:
        """Makes the policy, and shapes of the largest batch."""
        check_judges(self.config)
        if self._settings.pretraining:
            self._pretraining = Pretraining(self.config)
        policy = policy_model(self.config, make_objective(self._settings))
        self._learners = [(policy, self.config)]
        # MFU would count a row for each text, and texts share rows: see `Speed`.
        return dataclasses.replace(policy, inputs=None), self._example

    @functools.cached_property
    def _names(self) -> list[str]:
        """Names of the arrays of a batch besides those of `pack`."""
        settings, names = self._settings, list[str]()
        # Later updates of a rollout compare with the weights that drew the texts.
        if settings.num_updates(self.config.global_batch_size) > 1:
            names += ["old_logprobs"]
        if settings.reference:
            names += ["reference_logprobs"]
        if isinstance(settings.objective, rl.Ppo):
            names += ["values", "returns"]
        return [*names, KEY] if settings.pretraining else names

    @property
    def _example(self) -> Batch:
        """Shapes of the largest batch."""
        most = self._pretraining.num_rows if self._pretraining else 0
        return self._minibatches.example(self._names, num_more=most)

    @functools.cached_property
    def _minibatches(self) -> Minibatches:
        config, aggregation = self.config, aggregation_of(self._settings.objective)
        is_constant = aggregation == "constant_mean"
        return Minibatches(
            num_texts=config.global_batch_size,
            row_multiple=config.global_batch_size // config.microbatch_size,
            length=config.data.length,
            aggregation=aggregation,
            constant=self._settings.rollout.max_new_tokens if is_constant else 0,
            num_epochs=self._settings.num_epochs,
            seed=config.seed,
            experts=sizes_of_experts(config.model),
        )

    def _make_loader(self) -> Updates:
        """Makes the updates, which draw texts with the weights of the moment."""
        settings, config, rollout = self._settings, self.config, self._settings.rollout
        encoder = make_prompts(config.data, config.model.vocab_size)
        self._read_prompts(encoder)
        self._sampler = Sampler(
            self.run,
            encoder,
            max_length=config.data.length,
            sampling=Sampling(
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                num_logprobs=0,
                filtered_logprobs=True,
            ),
            seed=config.seed,
        )
        if isinstance(settings.critic, rl.Own):
            self._add_critic()
        self._speed = Speed(self._learners, self.run.mesh.size)
        self._tokens = TokenTargets(
            self.run,
            self.state,
            settings,
            self._minibatches,
            names=self._names,
            critic=self._critic,
        )
        self._judges = Judges(settings, self.run)
        position = {
            **self._judges.steps,
            **(self._pretraining.position if self._pretraining else {}),
            "seed": config.seed,
            "rl.prompts": self._prompts.digest,
            "rl.rollout.num_prompts": rollout.num_prompts,
            "rl.rollout.num_samples": rollout.num_samples,
            "global_batch_size": config.global_batch_size,
        }
        number = settings.num_updates(config.global_batch_size)
        text = f"rollouts: {rollout.num_prompts} of {len(self._prompts):,} prompts x "
        text += f"{rollout.num_samples} texts of up to {rollout.max_new_tokens} "
        text += f"tokens, {number} {'steps' if number > 1 else 'step'} on each"
        updates = Updates(
            self._draw,
            functools.partial(place_whole, self.run.step),
            self._directory,
            position | self._tokens.position,
            _half_learned(config),
            text,
            num_shares=self.run.plan.num_batch_shares,
            num_microbatches=config.num_microbatches,
        )
        check_same(updates.state())
        return updates

    def _read_prompts(self, encoder: Prompts) -> None:
        """Reads the prompts, and the held-out prompts if any are evaluated."""
        settings, config = self._settings, self.config
        rows, held_out = self._given
        most = config.data.length - settings.rollout.max_new_tokens
        encode = functools.partial(PromptSet, prompts=encoder, most=most)
        rows = read_rows("rl.prompts", settings.prompts) if rows is None else rows
        self._prompts = encode("rl.prompts", rows, seed=config.seed)
        if held_out is None and settings.evaluation_prompts:
            held_out = read_rows("rl.evaluation_prompts", settings.evaluation_prompts)
        self._held_out = None
        if held_out is not None and config.evaluation.num_batches:
            self._held_out = encode("rl.evaluation_prompts", held_out, seed=None)

    def _add_critic(self) -> None:
        """Makes the separate critic, which learns in each step."""
        start = {"store": self.store, "step": self.step}
        self._critic = Critic(self.config, self._example, **self._options, **start)
        self._learners.append(self._critic.learner)
        step = CriticStep.of(self.run.step, self._critic)
        self.run = dataclasses.replace(self.run, step=step)

    @property
    def _skipped_beside(self) -> dict[str, int]:
        """Skipped steps of a separate critic."""
        critic = self._critic
        return {PREFIX: int(critic.state.num_skipped)} if critic else {}

    def _saved(self, state: TrainState, rows: TrainState) -> tuple[Any, Any]:
        """Returns the arrays of a checkpoint, and plans, with a separate critic."""
        if self._critic is None:
            return super()._saved(state, rows)
        return self._critic.beside(state, rows)

    def _selected(self, saved: Any) -> Any:
        """Selects the arrays of the policy in a checkpoint."""
        is_own = isinstance(self._settings.critic, rl.Own)
        return of_policy(saved) if is_own else saved

    def _find_evaluation(self, batches: Any) -> EvaluationSet | None:
        """Returns None: `evaluate` draws texts."""
        return None

    def _draw(self, first: int) -> tuple[list[Update], int]:
        """Draws and scores a rollout; returns updates and the next prompt's number."""
        self._judges.start()  # what cannot be imported is told before texts are drawn
        self._wait()
        self._speed.begin_rollout()
        step = self.step
        experience, next_prompt = self._collect(first, step)
        speed, rollouts = self._speed.end_rollout(), experience.rollouts
        learned = self._tokens(self.state, experience, stopped=self._stopped)
        values = {**learned.values, **experience.metrics, **speed}
        given = rollouts, learned.advantages, learned.arrays
        updates = [
            Update(
                self._extended(self._minibatches.pack(*given, chosen), number), values
            )
            for number, chosen in enumerate(
                self._minibatches.split(len(rollouts), step), step
            )
        ]
        every = self.config.observe.log_every_steps
        logged = (step + len(updates)) // every * every
        if logged > step and jax.process_index() == 0:
            path = self._directory / "samples" / f"{logged}.txt"
            write_samples(path, rollouts, experience.rewards)
        self._speed.begin_update([update.batch for update in updates])
        return updates, next_prompt

    def _extended(self, packed: Packed, step: int) -> Mapping[str, Any]:
        """Returns the batch of a step, with rows of pre-training if there are any."""
        extra = self._pretraining
        return extra.extend(packed.batch, step) if extra else packed.batch

    def _collect(self, first: int, step: int) -> tuple[Experience, int]:
        """Draws a rollout, and another where masks leave nothing to learn from."""
        for _ in range(_MOST_TRUNCATED):
            experience, first = self._collect_groups(first, step)
            if experience.rollouts:
                return experience, first
            text = "step %s: all texts of a rollout were truncated, and are masked"
            logging.warning(text, step + 1)
        problem = f"leaves no text of {_MOST_TRUNCATED} rollouts, as all were truncated"
        remedy = "raise rl.rollout.max_new_tokens, or use 'keep'"
        raise DataError(Problem("rl.overlong", "mask", problem, remedy))

    def _collect_groups(self, first: int, step: int) -> tuple[Experience, int]:
        """Draws groups of texts, and again in place of groups of equal rewards."""
        settings, rollout = self._settings, self._settings.rollout
        sizes = rollout.num_prompts, rollout.num_samples
        groups = make_groups(settings, *sizes, max_refills=rollout.max_refills)
        while groups.num_wanted:
            numbers = range(first, first := first + rollout.num_prompts)
            drawn = self._sampler.draw(
                self.state,
                self._prompts,
                numbers,
                rollout.num_samples,
                step=step,
                stopped=self._stopped,
            )
            groups.add(self._judges.score(drawn, stopped=self._stopped))
        # Of all that were drawn, groups that others replace included.
        self._speed.add_texts(groups.rollouts)
        passed = self._passed(groups.rollouts)
        experience = groups.take()
        metrics = {**experience.metrics, **passed}
        return dataclasses.replace(experience, metrics=metrics), first

    def _end_of_batches(self) -> DataError:
        """Returns why no rollout could be drawn."""
        return self.loader.failure or super()._end_of_batches()

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes enclosed work from the time of the update."""
        self._wait()
        with self._speed.excluded():
            yield

    def _wait(self) -> None:
        """Waits for the devices: the time before belongs to the update."""
        beside = self._critic.state if self._critic else ()
        jax.block_until_ready((self.state, beside))

    def evaluate(self, part: str = "auto") -> dict[str, float]:
        """Draws texts of the held-out prompts, and scores them.

        The first `evaluation.num_batches` times `global_batch_size` texts are drawn, by
        draws that are the same in each evaluation. A signal to a run in one process
        drops the texts in flight: the evaluation then gives nothing.

        Args:
            part: Weights to evaluate, as for `zjax.Trainer.evaluate`.

        Returns:
            `eval_reward`, `eval_pass_at_1`, `eval_pass_at_k` of `rl.evaluation_samples`
            texts, `eval_length`, ...; empty without held-out prompts.

        Raises:
            ConfigError: The run has no such weights.
        """
        if self._held_out is None:
            return {}
        self._judges.start()
        samples, batches = (
            self._settings.evaluation_samples,
            self.config.evaluation.num_batches,
        )
        number = len(self._held_out)
        if batches > 0:
            most = batches * self.config.global_batch_size // samples
            number = max(1, min(number, most))
        given = self.state, self._held_out, range(number), samples
        stopped = self._stopped
        try:
            with self._untimed():
                options = {"step": self.step, "part": part, "stopped": stopped}
                drawn = self._sampler.draw(*given, **options)
                scored = self._judges.score(drawn, stopped=stopped)
        except RolloutStopped:
            logging.warning("step %s: a signal ended the evaluation", self.step)
            return {}
        groups = make_groups(self._settings, number, samples)
        groups.add(scored)
        values = {**groups.take().metrics, **self._passed(scored)}
        if part == "auto":
            self._last_evaluation = self.step, -values["reward"]  # the lowest is best
        return {f"eval_{name}": value for name, value in values.items()}

    def _passed(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Shares of texts and prompts that are solved by the first reward function."""
        functions = self._judges.functions
        return pass_rates(rollouts, functions[0]) if functions else {}

    @property
    def _counts_tokens(self) -> bool:
        """Returns False: texts have other lengths than rows."""
        return False

    def _fit(self) -> TrainState:
        """Trains under the lock of the directory, without files of killed runs."""
        self.loader.forget(self.store.steps())
        return super()._fit()

    def save(self) -> None:
        """Starts to write a checkpoint, with what is left of the rollout beside.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written.
            OutputError: The rollout could not be written.
        """
        with self._untimed():
            super().save()
            self.loader.forget([*self.store.steps(), self.step])

    def close(self) -> None:
        """Waits for the last checkpoint, and ends all threads and processes.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        self._judges.close()
        super().close()


def _half_learned(config: Config) -> dict[str, Any]:
    """Lists settings of which values and advantages of a rollout's tokens are made."""
    assert config.rl is not None
    settings = to_mapping(config.rl)
    names = "objective", "overlong", "rewards", "correction", "reference", "num_epochs"
    names += ("pretraining",)
    chosen = {name: settings[name] for name in ("rollout", *names)}
    found = {"data.length": config.data.length, **dict(leaves(chosen, "rl."))}
    # As a checkpoint gives them back: lists in place of tuples.
    return json.loads(json.dumps(found))
