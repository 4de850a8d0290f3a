"""A saved reward model as the judge of rollouts."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import optax
from absl import logging

from zjax.checkpoint.start import open_run, place_weights
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import tokenizer_of_run
from zjax.config.load import saved_config
from zjax.data.source import read_record
from zjax.errors import CheckpointError, DataError, Problem
from zjax.files import local_path
from zjax.models.build import make_model
from zjax.ops.remat import Memory
from zjax.rl.packing import Sampled, pack
from zjax.run.build import Run
from zjax.run.token_scores import TokenScores
from zjax.settings import schema
from zjax.sharding.activations import batch_shardings
from zjax.sharding.plan import make_plan
from zjax.storage.move import store, to_devices


class RewardRun:
    """The newest weights of a run whose model has values, on the devices of a policy.

    The reward of a rollout is the value of its last token. The model reads the tokens
    of the policy: both have one tokenizer.

    Args:
        directory: Directory of the run of the reward model, such as
            `preference=reward_model` makes.
        policy: Run of the policy, which gives the mesh, the ZeRO stage and the
            compute dtype.
        num_rows: Rows of a pass, 1 or more; rounded up to what divides over devices.
        memory: Memory that stores the weights between passes, `device` or
            `pinned_host`.

    Raises:
        CheckpointError: The directory has no checkpoint, or a model without values or
            with another vocabulary or tokenizer than the policy's.

    Example:
        >>> def rewards(rollouts, policy):
        ...     return RewardRun("runs/reward", policy).score(rollouts)
    """

    def __init__(
        self,
        directory: str,
        policy: Run,
        *,
        num_rows: int = 8,
        memory: Memory = "device",
    ):
        if problems := judge_problems(directory, policy.config):
            raise CheckpointError(*problems)
        checkpoints = Store(str(find_steps(_place("rewards", directory))))
        self.step = checkpoints.steps()[-1]
        saved = saved_config(checkpoints.extra(self.step))
        zero = policy.config.zero
        zero = schema.Zero(stage=zero.stage, min_shard_elements=zero.min_shard_elements)
        config = dataclasses.replace(
            policy.config,
            model=dataclasses.replace(saved.model, activation_memory="device"),
            data=dataclasses.replace(policy.config.data, length=saved.data.length),
            optimizer=schema.Optimizer(),
            zero=zero,
            lora=None,
        )
        self._model, self._length = make_model(config), saved.data.length
        # A judge is never updated: set_to_zero has no optimizer state to place.
        tx = optax.set_to_zero()
        self._plan = make_plan(config, policy.mesh, self._model, tx)
        shares = self._plan.num_batch_shares
        self._num_rows = -(-num_rows // shares) * shares
        rows, tree = jax.tree.flatten(self._plan.compute)
        on_device = jax.tree.unflatten(tree, [row.on_device for row in rows])
        self._rows = [row.stored_in(memory) for row in rows]
        arrays = place_weights(open_run(checkpoints), on_device, directory)
        pairs = zip(arrays, self._rows, strict=True)
        self._params, self._tree = [store(x, row) for x, row in pairs], tree
        # A pass takes its rows at once.
        sizes = {"global_batch_size": self._num_rows, "num_microbatches": 1}
        config = dataclasses.replace(config, microbatch_size=0, **sizes)
        self._scores = TokenScores(self._model, self._plan, config)

    def score(self, rollouts: Sequence[Sampled]) -> list[float | None]:
        """Computes the rewards of rollouts, as a `Scorer`.

        Args:
            rollouts: Rollouts of the policy.

        Returns:
            The reward of each; None for a rollout that is longer than the rows that the
            reward model was trained on, of which a warning tells.

        Raises:
            DataError: A reward is not finite.
        """
        fits = [len(x.prompt_ids) + len(x.ids) <= self._length for x in rollouts]
        if num_long := fits.count(False):
            text = "rewards: %d rollouts are longer than %d tokens, and have no reward"
            logging.warning(text, num_long, self._length)
        advantages = np.where(fits, 0.0, np.nan)  # NaN leaves a rollout out
        most = -(-max(1, len(rollouts)) // self._num_rows)
        counts = [self._num_rows * number for number in range(1, most + 1)]
        packed = pack(rollouts, advantages, length=self._length, num_rows=counts)
        values = self._values(packed.batch)
        rewards = [
            None if place is None else float(values[place[0], place[1].stop])
            for place in packed.places
        ]
        problems = [
            Problem(f"rewards[{i}]", x, "is not finite", "train the reward model again")
            for i, x in enumerate(rewards)
            if x is not None and not np.isfinite(x)
        ]
        if problems:
            raise DataError(*problems)
        return rewards

    def _values(self, batch) -> np.ndarray:
        """Computes the values of all tokens, a number of rows at a time."""
        # The next call reads the stored parameters again: do not consume them.
        staged = [
            to_devices(x, row, is_consumed=False)
            for x, row in zip(self._params, self._rows, strict=True)
        ]
        params = jax.tree.unflatten(self._tree, staged)
        names, found = ("tokens", "targets", "segment_ids", "positions"), []
        for start in range(0, len(batch["tokens"]), self._num_rows):
            rows = slice(start, start + self._num_rows)
            part = {name: batch[name][rows] for name in names}
            places = batch_shardings(self._plan, part, self._model.entries)
            placed = jax.tree.map(jax.device_put, part, places)
            found.append(np.asarray(self._scores.values_by_copy(params, placed)))
        return np.concatenate(found)


def judge_problems(
    directory: str, policy: schema.Config, field: str = "rewards"
) -> list[Problem]:
    """Lists reasons why the model of a run cannot judge the texts of a policy.

    `field` names the setting of the directory in the problems.
    """
    steps = find_steps(_place(field, directory))
    if steps is None:
        problem, remedy = "holds no checkpoint", "give the directory of a run"
        return [Problem(field, directory, problem, remedy)]
    checkpoints = Store(str(steps))
    judge, problems = saved_config(checkpoints.extra()).model, []
    if not judge.value_head:
        problem, remedy = "has no values", "train it with preference=reward_model"
        problems += [Problem(field, directory, problem, remedy)]
    remedy, size = "train it with the policy's tokenizer", policy.model.vocab_size
    if judge.vocab_size != size:
        problem = f"has {judge.vocab_size} tokens, and the policy {size}"
        problems += [Problem(field, directory, problem, remedy)]
    mine = read_record(policy.data, size)
    theirs = tokenizer_of_run(checkpoints).record
    if theirs is None:
        text = "rewards: %s has no tokenizer to compare with the policy's"
        logging.warning(text, directory)
    elif mine.digest != theirs.digest:
        problem = f"has the tokenizer {theirs.name!r}, and the policy {mine.name!r} "
        problem += "with other tokens"
        problems += [Problem(field, directory, problem, remedy)]
    return problems


def _place(field: str, directory: str) -> pathlib.Path:
    """Path of a directory, with `~` and variables expanded."""
    return pathlib.Path(local_path(field, directory, CheckpointError))
