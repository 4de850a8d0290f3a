"""One optimizer step: unscale, check, clip, then update or skip."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim import precision, transforms
from zjax.optim.transforms import update_ema
from zjax.settings.schema import Optimizer, Precision
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import constrain, pad_tree, place_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.roles import MovedParam, joined, move_params, moves_of, trained
from zjax.stack.forward import named_totals
from zjax.train.average import check_moved
from zjax.train.compute_params import (
    compute_params,
    computed_once,
    join_master,
    stored_master,
)
from zjax.train.state import TrainState
from zjax.typing import Loss, Metrics, Params, Stack

Schedule = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sent:
    """The message of a step and the function that averages the message over replicas.

    Args:
        exchange: `exchange(tree, errors, applies) -> (mean, errors)`, inside
            `shard_map` over `replica`.
        message: `message(grads, opt_state)`, the tree that replicas send in place of
            gradients; None for the gradients.
        arguments: Further arguments of the optimizer, such as the phase.
    """

    exchange: Callable[[Params, Any, jax.Array], tuple[Params, Any]]
    message: Callable[[Any, Any], Any] | None = None
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def norm(self, norm: jax.Array) -> jax.Array:
        """Root mean square of the replicas' norms; not finite if any norm is not."""
        return jnp.sqrt(jax.lax.pmean(norm * norm, REPLICA))


def loss_scale_of(state: TrainState) -> jax.Array:
    """Returns the loss scale, float32[]; 1 unless computing in float16."""
    return jnp.float32(1) if state.scaler == () else state.scaler.scale


def make_update(
    tx: Any,
    plan: Plan,
    optimizer: Optimizer,
    precision: Precision,
    schedule: Schedule | None,
    stack: Stack | None,
    sent: Sent | None = None,
) -> "Update":
    """Builds `update(state, grads, loss, value_fn) -> (state, metrics)`.

    `sent` is the message between replicas, None if gradients are averaged before. The
    optimizer gets `value`, `grad` and `value_fn` if it asks. Raises PlanError if the
    optimizer averages parameters that totals move.
    """
    moved = moves_of(plan.master, stack)
    check_moved(moved.keys(), plan.opt_state)
    rows = trained(plan.master, plan.master)
    counted = jax.tree.map(lambda row: row.follows == "gradient", rows)
    tx = optax.with_extra_args_support(tx)
    return Update(tx, plan, optimizer, precision, schedule, counted, moved, sent)


class _Checks(NamedTuple):
    """Whether a step is finite, and whether it also trains anything; bool[]."""

    is_finite: jax.Array
    applies: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """A pure function: one step of the optimizer.

    A step with a gradient that is not finite changes nothing but `step`, `num_skipped`
    and the scaler (arXiv:1710.03740). A batch without a token that counts changes only
    `step` and `num_skipped`. If `precision.on_nonfinite` is `update`, all steps apply.

    Args:
        optimizer: Settings of clipping and averaging, and the name of the rule.
        precision: Settings of loss scaling, and of gradients that are not finite.
        counted: bool for each parameter with a gradient; False counts it as 0.
        moved: Rules by path of parameters that move with the totals of a step.
        sent: Message averaged over replicas; None for gradients that are averaged.
    """

    tx: Any
    plan: Plan
    optimizer: Optimizer
    precision: Precision
    schedule: Schedule | None
    counted: Any
    moved: Mapping[str, MovedParam]
    sent: Sent | None = None

    def __call__(
        self,
        state: TrainState,
        grads: Params,
        loss: Loss,
        value_fn: Callable[[Params], jax.Array],
    ) -> tuple[TrainState, Metrics]:
        """Unscales, checks, clips and applies gradients; `state` is not consumed.

        `grads` are in logical shapes, times the loss scale; `value_fn` is the loss of
        any master weights.
        """
        plan = self.plan
        # Every device needs all of the totals, and processes read them as metrics.
        totals = jax.tree.map(self.replicated, loss.totals)
        loss = loss._replace(totals=totals)
        grads = self.unscaled(grads, loss_scale_of(state))
        opt_state = unpad_tree(state.opt_state, plan.opt_state)
        grads, norm, extra, checks = self.clipped(grads, opt_state, state.extra, loss)
        stored = join_master(state.master, state.params, plan)
        whole = unpad_tree(stored, plan.master)
        master = trained(whole, plan.master)
        updates, opt_state = self.tx.update(
            grads,
            opt_state,
            master,
            value=loss.value,
            grad=grads,
            value_fn=lambda x: value_fn(joined(x, whole, plan.master)),
            **(self.sent.arguments if self.sent else {}),
        )
        new = optax.apply_updates(master, updates)
        new = move_params(master, new, self.moved, loss.totals)
        new = self.stored_if_applied(new, stored, checks.applies)
        changed = self.state_after(state, new, opt_state, extra, loss, checks)
        return changed, self.metrics(state, loss, norm, checks.applies)

    def clipped(
        self, grads: Params, opt_state: Any, errors: Any, loss: Loss
    ) -> tuple[Params, jax.Array, Any, _Checks]:
        """Returns clipped gradients, or the mean message that replicas send instead."""
        norm, sent = transforms.global_norm(grads), self.sent
        if sent is not None:
            norm = sent.norm(norm)
        # A gradient that is not finite leaves no norm that is.
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.value)
        # Weights would decay by a batch without a token that is trained.
        applies = finite & (loss.weight != 0)
        if self.updates_always:
            finite = applies = jnp.bool_(True)
        # Gradients are averaged before clipping, whereas messages are made of clipped
        # gradients.
        if sent is not None and sent.message is None:
            grads, errors = sent.exchange(grads, errors, applies)
            norm = transforms.global_norm(grads)
        grads = transforms.clip_by_norm(grads, norm, self.optimizer.clip_norm)
        if sent is not None and sent.message is not None:
            message = sent.message(grads, opt_state)
            grads, errors = sent.exchange(message, errors, applies)
        return grads, norm, errors, _Checks(finite, applies)

    @property
    def updates_always(self) -> bool:
        """Whether a step is applied even if gradients are not finite."""
        return self.precision.on_nonfinite == "update"

    def unscaled(self, grads: Params, scale: jax.Array) -> Params:
        """Divides gradients by the loss scale, in the dtype of the optimizer."""
        inverse = 1 / scale
        grads = place_tree(grads, self.plan.grads)
        grads = jax.tree.map(
            lambda g, row: (g.astype(jnp.float32) * inverse).astype(row.dtype),
            grads,
            trained(self.plan.master, self.plan.master),
        )
        # Parameters that follow totals must not count in the norm.
        return jax.tree.map(
            lambda g, t: g if t else jnp.zeros_like(g), grads, self.counted
        )

    def replicated(self, x: jax.Array) -> jax.Array:
        """Constrains an array to every device."""
        return constrain(x, self.plan.replicated)

    def kept_if_applied(self, new: Any, old: Any, applies: jax.Array) -> Any:
        """Returns the new arrays, or the old arrays in a step that is skipped."""
        if self.updates_always:
            return new
        return jax.tree.map(lambda n, o: jnp.where(applies, n, o), new, old)

    def stored_if_applied(self, new: Params, stored: Params, applies: Any) -> Params:
        """Returns new weights, or old weights in a skipped step; adds frozen ones."""
        rows = trained(self.plan.master, self.plan.master)
        new = pad_tree(place_tree(new, rows), rows)
        new = self.kept_if_applied(new, trained(stored, self.plan.master), applies)
        new = jax.tree.map(computed_once, new, rows)
        return joined(new, stored, self.plan.master)

    def state_after(
        self,
        state: TrainState,
        master: Params,
        opt_state: Any,
        extra: Any,
        loss: Loss,
        checks: _Checks,
    ) -> TrainState:
        """Returns the state with new master weights and all dependent arrays."""
        applies, keep = checks.applies, self.kept_if_applied
        plan, scaler, ema, params = self.plan, state.scaler, state.ema, state.params
        if scaler != ():
            settings = self.precision.loss_scale
            scaler = precision.update_scaler(scaler, ~checks.is_finite, settings)
        if ema != ():
            # Skipped steps do not age the average.
            applied = state.step - state.num_skipped
            decay = self.optimizer.ema_decay
            new = update_ema(ema, trained(master, plan.master), decay, applied)
            ema = keep(new, ema, applies)
        if params != ():
            logical = unpad_tree(master, plan.master)
            # `master` has old weights in a skipped step: no further select is needed.
            params = pad_tree(compute_params(logical, plan), plan.compute)
        opt_state = pad_tree(opt_state, plan.opt_state)
        return TrainState(
            step=state.step + 1,
            num_skipped=state.num_skipped + ~applies,
            master=jax.tree.map(stored_master, master, plan.master),
            opt_state=keep(opt_state, state.opt_state, applies),
            model_state=keep(loss.model_state, state.model_state, applies),
            scaler=scaler,
            ema=ema,
            extra=extra,
            params=params,
        )

    def metrics(
        self, state: TrainState, loss: Loss, norm: jax.Array, applies: jax.Array
    ) -> Metrics:
        """Returns metrics of the loss and the step, float32[] each, and the totals."""
        step_metrics = {
            "loss": loss.value,
            "weight": loss.weight,
            "grad_norm": norm,
            "skipped_steps": state.num_skipped + ~applies,
        }
        if self.schedule is not None:
            step_metrics["learning_rate"] = self.schedule(
                # Schedules count applied steps, as the optimizer's own counter does.
                state.step - state.num_skipped
            )
        if state.scaler != ():
            step_metrics["loss_scale"] = state.scaler.scale
            settings = self.precision.loss_scale
            step_metrics["loss_scale_spent"] = precision.at_minimum(
                state.scaler, settings
            )
        scalars = {
            name: jnp.float32(value)
            for name, value in (loss.metrics | step_metrics).items()
        }
        return scalars | named_totals(loss.totals)
