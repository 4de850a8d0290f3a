"""What a run learns at each token of a rollout, by the weights that drew the texts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from zjax.rl.credit import token_advantages
from zjax.rl.critic_run import Critic
from zjax.rl.groups import Experience
from zjax.rl.minibatches import Minibatches
from zjax.rl.placing import place_whole
from zjax.rl.policy import logprobs_of, values_of
from zjax.rl.reference import Reference
from zjax.rl.rollouts import Rollout
from zjax.rl.stopping import Stopped, never, until
from zjax.rl.weight_digest import digest_weights
from zjax.run.first_state import first_state
from zjax.settings import rl
from zjax.sharding.plan import Plan, make_plan

Values = list[np.ndarray]
"""Values of the tokens of each text, float32[n]."""


class Learned(NamedTuple):
    """Values of the texts of a rollout that its updates read."""

    advantages: Sequence[np.ndarray] | np.ndarray
    """Advantage of each text, or of each token of each text."""
    arrays: Mapping[str, Values]
    """Further values by name under `rl` of a batch."""
    values: Mapping[str, float]
    """Metrics."""


class TokenTargets:
    """Computes what the updates on a rollout read, before the first of them.

    Args:
        run: `zjax.Run` of the policy.
        state: State of the run; not consumed.
        settings: Settings of `config.rl`.
        minibatches: Packs texts.
        names: Names under `rl` of the arrays that updates read besides those of `pack`.
        critic: Separate critic; None where the policy has the values, or none.

    Attributes:
        position: Digest of the reference, which a run goes on with.
    """

    def __init__(
        self,
        run: Any,
        state: Any,
        settings: rl.Rl,
        minibatches: Minibatches,
        *,
        names: Sequence[str],
        critic: Critic | None = None,
    ):
        self._run, self._settings, self._minibatches = run, settings, minibatches
        self._names, self._critic = names, critic
        self._stopped: Stopped = never
        self._reference, self.position = None, dict[str, Any]()
        if given := settings.reference:
            start, plan = _first_weights(run, state)
            self._reference = Reference(run, start, memory=given.memory)
            if not run.config.lora:  # else they are in the checkpoint of the run
                digest = digest_weights(start, plan)
                self.position = {"weights of checkpoint.init_from": digest}

    def __call__(
        self, state: Any, experience: Experience, *, stopped: Stopped = never
    ) -> Learned:
        """Returns advantages, further values of tokens, and metrics.

        Args:
            state: State of the weights that drew the texts; not consumed.
            experience: Texts with rewards.
            stopped: Function that is asked between passes whether to stop.

        Raises:
            RolloutStopped: The function said so.
        """
        self._stopped = stopped
        rollouts, reference = experience.rollouts, self._settings.reference
        arrays, values = dict[str, Values](), dict[str, float]()
        at_temperature = {"temperature": self._settings.rollout.temperature}
        old: Values = []
        keeps_old = "old_logprobs" in self._names
        if keeps_old or isinstance(reference, rl.InReward):
            score = functools.partial(logprobs_of, self._run, **at_temperature)
            old = self._score(state, rollouts, score)
            pairs = zip(old, rollouts, strict=True)
            gaps = [float(np.abs(x - y.logprobs).max()) for x, y in pairs]
            values["sampler_gap_max"] = max(gaps, default=0.0)
            arrays |= {"old_logprobs": old} if keeps_old else {}
        if self._reference:
            score = functools.partial(self._reference.logprobs, **at_temperature)
            arrays["reference_logprobs"] = self._score(state, rollouts, score)
        objective, advantages = self._settings.objective, experience.advantages
        if isinstance(objective, rl.Returns):
            penalties = [np.zeros(len(x.ids), np.float32) for x in rollouts]
            if isinstance(reference, rl.InReward):
                pairs = zip(old, arrays["reference_logprobs"], strict=True)
                penalties = [reference.coefficient * (x - y) for x, y in pairs]
            known = None
            if isinstance(objective, rl.Ppo):
                score = functools.partial(values_of, self._run)
                if critic := self._critic:
                    score = critic.values
                known = arrays["values"] = self._score(state, rollouts, score)
            given = objective, experience.rewards, penalties, known
            advantages, returns = token_advantages(*given)
            arrays |= {"returns": returns} if known else {}
        return Learned(advantages, arrays, values)

    def _score(
        self, state: Any, rollouts: Sequence[Rollout], score: Callable[..., jax.Array]
    ) -> Values:
        """Computes a value of each token of texts, in packed batches."""
        found = list[np.ndarray]()
        nothing = np.zeros(len(rollouts), np.float32)  # no advantage
        for chosen in until(self._stopped, self._minibatches.in_order(len(rollouts))):
            packed = self._minibatches.pack(rollouts, nothing, {}, chosen)
            # A forward pass takes the batches of a step, and reads none of these.
            unread = np.zeros_like(packed.batch["weights"])
            packed = packed.with_arrays(**{name: unread for name in self._names})
            batch = place_whole(self._run.step, packed.batch)
            found += packed.unpack(np.asarray(score(state, batch)))
        return found


def _first_weights(run: Any, state: Any) -> tuple[Any, Plan]:
    """Returns a state with the weights that a run started from, and the plan.

    Adapters leave these weights in the state; else a resumed run reads them again.
    """
    if not int(state.step) or run.config.lora:
        return state, run.plan
    tx = optax.set_to_zero()  # no moments beside the weights
    plan = make_plan(run.config, run.mesh, run.model, tx)
    return first_state(run.model, tx, plan, run.config), plan
