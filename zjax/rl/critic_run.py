"""A separate critic: a second model that learns values beside the policy."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import check_start
from zjax.config.load import saved_config
from zjax.errors import CheckpointError, Problem
from zjax.replicas.state import saved_rows, saved_state
from zjax.rl.critic import critic_model
from zjax.rl.policy import values_of
from zjax.rl.recipes import value_of
from zjax.run.build import start_run
from zjax.run.step import Step
from zjax.settings import rl, schema
from zjax.settings.critic import critic_settings
from zjax.train.state import TrainState
from zjax.typing import Batch, Device, Metrics
from zjax.weights.saved import CRITIC, SavedArrays

PREFIX = "critic_"
"""Beginning of the names of a separate critic's metrics."""


class Critic:
    """The model of values of `rl.critic=own`, on the devices of the policy.

    Args:
        config: Checked settings of the policy's run.
        batch: Shapes of the largest batch of the policy.
        tx: Optax gradient transformation of the user; None for the settings.
        devices: Devices of the policy; all if None.
        store: Checkpoints of the run.
        step: Step of the checkpoint to go on from; 0 for the first weights.

    Attributes:
        run: `zjax.Run` of the critic.
        state: State of the critic.
        learner: Model with `inputs`, and settings of the critic.

    Raises:
        CheckpointError: Weights that cannot be read, do not fit the policy's shape, or
            are of another tokenizer.
        PlanError: Arrays that cannot be placed.
    """

    def __init__(
        self,
        config: schema.Config,
        batch: Batch,
        *,
        tx: Any,
        devices: Sequence[Device] | None,
        store: Store,
        step: int,
    ):
        assert config.rl is not None and isinstance(config.rl.critic, rl.Own)
        if not step and (start := config.rl.critic.init_from):
            given = {"rl.critic.init_from": start}
            check_start(given, config.data, config.model.vocab_size)
        settings = critic_settings(config)
        model = critic_model(settings, value_of(config.rl))
        self.learner = model, settings
        # MFU would count a row for each text, and texts share rows: see `Speed`.
        model = dataclasses.replace(model, inputs=None)

        def restore(rows: TrainState) -> TrainState:
            return store.restore(rows, step, select=_of_critic)[0]

        given = {"batch": _routed_anew(batch), "devices": devices}
        restored = restore if step else None
        self.run = start_run(settings, model, tx, restore=restored, **given)
        self.state = self.run.state

    def values(self, state: Any, batch: Batch) -> jax.Array:
        """Computes the value of each token of a batch, float32[B, L].

        Args:
            state: State of the policy, which is not read.
            batch: Batch of `zjax.rl.pack`.
        """
        return values_of(self.run, self.state, _routed_anew(batch))

    def learn(self, batch: Batch) -> Metrics:
        """Takes a step on the values of a batch; returns metrics on the devices."""
        self.state, metrics = self.run.step(self.state, _routed_anew(batch))
        shown = {f"{PREFIX}{x}": metrics[x] for x in ("grad_norm", "skipped_steps")}
        return {x: metrics[x] for x in ("value_loss", "value")} | shown

    def beside(self, state: TrainState, rows: TrainState) -> tuple[Any, Any]:
        """Adds the critic to the arrays of a checkpoint, and to the plans."""
        if self.state.pending:
            self.state = self.run.step.settle(self.state)
        mine = saved_state(self.state, self.run.plan)
        plans = saved_rows(self.run.plan, self.run.config)
        return vars(state) | {CRITIC: mine}, vars(rows) | {CRITIC: plans}


@dataclasses.dataclass(frozen=True)
class CriticStep(Step):
    """Step of the policy, after which the critic learns from the same batch."""

    learn: Callable[[Batch], Metrics] = lambda batch: {}

    @classmethod
    def of(cls, step: Step, critic: Critic) -> "CriticStep":
        """Makes the step of a policy and of the policy's critic."""
        fields = dataclasses.fields(step)
        given = {field.name: getattr(step, field.name) for field in fields}
        return cls(**given, learn=critic.learn)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step of each model, as `Step` does of one."""
        placed = self.place_batch(batch)
        state, metrics = super().__call__(state, placed)
        return state, {**metrics, **self.learn(placed)}


def check_models(saved: Mapping[str, Any], config: schema.Config) -> None:
    """Refuses an objective or critic that learns other models than a checkpoint has.

    Args:
        saved: Metadata of the checkpoint.
        config: Settings with `rl` of the run that goes on.

    Raises:
        CheckpointError: The policy or a separate critic has values in one alone.
    """
    before, now = saved_config(saved).rl, config.rl
    assert now is not None
    if before is None or _value_models(before) == _value_models(now):
        return
    problem = "was {!r} in the saved run, whose models are others"
    remedy = "restore it, or start another run with checkpoint.init_from="
    remedy += config.directory
    kinds = {
        "rl.objective": (before.objective.kind, now.objective.kind),
        "rl.critic": (before.critic.kind, now.critic.kind),
    }
    raise CheckpointError(
        *(
            Problem(field, new, problem.format(old), remedy)
            for field, (old, new) in kinds.items()
            if old != new
        )
    )


def _value_models(settings: rl.Rl) -> tuple[bool, bool]:
    """Whether the policy has values, and whether a separate critic has values."""
    return settings.has_values, isinstance(settings.critic, rl.Own)


def of_policy(saved: SavedArrays) -> SavedArrays:
    """Selects the policy's arrays in a checkpoint with a critic."""
    return saved.outside(CRITIC)


def _of_critic(saved: SavedArrays) -> SavedArrays:
    """Selects the critic's arrays in a checkpoint."""
    return saved.part(CRITIC)


def _routed_anew(batch: Batch) -> Any:
    """Leaves out the experts of the policy: the critic's routers choose others."""
    return {name: x for name, x in batch.items() if name != "experts"}
