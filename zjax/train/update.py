"""One optimizer step: unscale, check, clip, update, keep or skip."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.config.schema import Config
from zjax.optim import clip, loss_scale
from zjax.optim.ema import update_ema
from zjax.optim.groups import trained_params
from zjax.sharding.placement import pad_tree, place_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.compute_params import compute_params
from zjax.train.master import computed_once, half_at_rest, whole_master
from zjax.train.state import TrainState
from zjax.typing import Loss, Metrics, Params

Schedule = Callable[[jax.Array], jax.Array]


def loss_scale_of(state: TrainState) -> jax.Array:
    """The factor on the loss in this step's backward pass.

    Args:
        state: Its scaler, if it has one.

    Returns:
        float32[]; 1 unless computing in float16.
    """
    return jnp.float32(1) if state.scaler == () else state.scaler.scale


def make_update(
    tx: Any, plan: Plan, config: Config, schedule: Schedule | None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Builds `update(state, grads, loss, value_fn) -> (state, metrics)`.

    Gradients are divided by the scale that this step's backward pass used. A step with
    a gradient that is not finite changes nothing but `step`, `num_skipped` and the
    scaler (arXiv:1710.03740), unless `precision.on_nonfinite` is `update`.

    Args:
        tx: Optax gradient transformation; it gets `value`, `grad` and `value_fn` if it
            asks for them.
        plan: Places gradients and state.
        config: Read for `optimizer` and `precision`.
        schedule: Learning rate by applied step, for the metrics; None where unknown.

    Returns:
        A pure function. `grads` are in logical shapes, still scaled.
    """
    tx = optax.with_extra_args_support(tx)
    limit = config.optimizer.clip_norm
    trained = trained_params(plan.master, config.optimizer.groups)

    def update(
        state: TrainState,
        grads: Params,
        loss: Loss,
        value_fn: Callable[[Params], jax.Array],
    ) -> tuple[TrainState, Metrics]:
        inverse = 1 / loss_scale_of(state)
        grads = place_tree(grads, plan.grads)
        grads = jax.tree.map(
            lambda g, row: (g.astype(jnp.float32) * inverse).astype(row.dtype),
            grads,
            plan.master,
        )
        grads = jax.tree.map(lambda g, t: g if t else jnp.zeros_like(g), grads, trained)
        norm = clip.global_norm(grads)
        # A gradient that is not finite leaves no norm that is.
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.value)
        if config.precision.on_nonfinite == "update":
            finite = jnp.bool_(True)
        grads = clip.clip_by_norm(grads, norm, limit)
        stored = whole_master(state.master, state.params, plan)
        master = unpad_tree(stored, plan.master)
        updates, opt_state = tx.update(
            grads,
            unpad_tree(state.opt_state, plan.opt_state),
            master,
            value=loss.value,
            grad=grads,
            value_fn=value_fn,
        )
        new = place_tree(optax.apply_updates(master, updates), plan.master)
        new = keep(pad_tree(new, plan.master), stored, finite)
        new = jax.tree.map(computed_once, new, plan.master)
        changed = state_after(state, new, opt_state, loss, finite)
        return changed, _metrics(state, loss, norm, finite)

    def keep(new: Any, old: Any, finite: jax.Array) -> Any:
        if config.precision.on_nonfinite == "update":
            return new
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    def state_after(
        state: TrainState, master: Params, opt_state: Any, loss: Loss, finite: jax.Array
    ) -> TrainState:
        scaler = state.scaler
        if scaler != ():
            settings = config.precision.loss_scale
            scaler = loss_scale.update_scaler(scaler, ~finite, settings)
        ema = state.ema
        if ema != ():
            applied = state.step - state.num_skipped
            average = update_ema(ema, master, config.optimizer.ema_decay, applied)
            ema = keep(average, ema, finite)
        params = state.params
        if params != ():
            logical = unpad_tree(master, plan.master)
            params = pad_tree(compute_params(logical, plan), plan.compute)
        return TrainState(
            step=state.step + 1,
            num_skipped=state.num_skipped + ~finite,
            master=jax.tree.map(half_at_rest, master, plan.master),
            opt_state=keep(
                pad_tree(opt_state, plan.opt_state), state.opt_state, finite
            ),
            model_state=keep(loss.model_state, state.model_state, finite),
            scaler=scaler,
            ema=ema,
            extra=state.extra,
            params=params,
        )

    def _metrics(
        state: TrainState, loss: Loss, norm: jax.Array, finite: jax.Array
    ) -> Metrics:
        own = {
            "loss": loss.value,
            "weight": loss.weight,
            "grad_norm": norm,
            "skipped_steps": state.num_skipped + ~finite,
        }
        if schedule is not None:
            own["learning_rate"] = schedule(state.step - state.num_skipped)
        if state.scaler != ():
            own["loss_scale"] = state.scaler.scale
            settings = config.precision.loss_scale
            own["loss_scale_spent"] = loss_scale.at_minimum(state.scaler, settings)
        return {
            name: jnp.float32(value) for name, value in (loss.metrics | own).items()
        }

    return update
