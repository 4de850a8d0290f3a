"""Executor of replicas that train apart and exchange parameters every few steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.replicas.local_steps import (
    CommonStep,
    LocalStep,
    end_of_round,
    make_outer_step,
)
from zjax.run.compiler import step_options
from zjax.run.executor import StepNumber
from zjax.run.fused import FusedExecutor, make_programs
from zjax.run.streamed import check_together, check_warm_up
from zjax.schedule.exchange import LOCAL, Exchanges, Phase
from zjax.settings.schema import Config
from zjax.sharding.placement import abstract_tree, shardings
from zjax.sharding.plan import Plan
from zjax.sharding.roles import only_followers, with_followers
from zjax.train.exchange import make_sent
from zjax.train.outer_state import make_fragments
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


class LocalStepsExecutor(FusedExecutor):
    """Executor whose replicas communicate in few steps: local SGD, DiLoCo, 0/1 Adam.

    Programs are `train`, a local step; `evaluate` on the anchor; for each fragment
    `outer_gradients_0`, `mean_0` and `merge_0`, and so on, where only `mean_0`
    communicates; `end_of_round`; and one program for each phase in which replicas step
    together, by name. The host waits for no program, so with a delay the mean of a
    fragment is computed while local steps run, on devices that run programs side by
    side; GPUs take programs in turn.

    Args:
        model: Model and loss as pure functions.
        tx: Optax gradient transformation of the local steps.
        plan: Plan of every array, all on the devices.
        config: Checked settings.
        schedule: Learning rate by applied step, for the metrics.
        exchanges: What replicas exchange in each step.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        exchanges: Exchanges,
    ):
        rows = state_rows(plan, config)
        programs = _programs(model, tx, plan, config, schedule, exchanges, rows)
        super().__init__(model, plan, config, programs)
        self._exchanges, self._number = exchanges, StepNumber()

    def state_of(self, program: str) -> TrainState:
        """ArrayPlans of the state that a program reads."""
        rows = super().state_of(program)
        return _of_replicas(rows) if program == "train" else rows

    def inputs_of(self, program: str, batch: Batch) -> tuple[Any, ...]:
        """Shapes of a program's arguments."""
        anchor, outer = self.state_plan.master, self.state_plan.extra
        kind, _, number = program.rpartition("_")
        if kind == "mean":
            outer_gradients = self.programs[f"outer_gradients_{number}"]
            places = abstract_tree((anchor, outer.replicas))
            grads = outer_gradients.lower(*places).compile()
            return _outputs(grads), abstract_tree(outer.errors[int(number)])
        if program == "end_of_round":
            replicas = outer.replicas
            shared = _shared_at_ends(replicas, self.state_plan), replicas.num_skipped
            return *abstract_tree(shared), _outputs(self.compile("train", batch))[1]
        return super().inputs_of(program, batch)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes a step, then sends or merges fragments due; donates the state."""
        is_known, number = self._number.knows(state), self._number.before(state) + 1
        check_warm_up(state, number, self._exchanges.freeze_step, is_known=is_known)
        exchange = self._exchanges.at(number)
        if exchange.phase.message == "nothing":
            state, metrics = self._train_apart(state, batch)
        else:
            if not is_known and number > 1:
                # A state from elsewhere may have stepped apart; comparing replicas
                # waits for the device.
                check_together(state, self._exchanges)
            state, metrics = self.programs[exchange.phase.program](state, batch)
        sent, merged = exchange.sent, exchange.merged
        arriving = state.extra.arriving
        if sent is not None:
            state, mean = self._send(state, sent)
            # Without a delay the mean is merged in this step, and the state never
            # stores it.
            arriving = {**dict(enumerate(arriving)), sent: mean}
        if merged is not None:
            state = self._merge(state, merged, arriving[merged])
        if exchange.ends_round:
            state, metrics = self._end_round(state, metrics)
        if exchange.resets_errors:
            errors = self.programs["without_errors"](state.extra.errors)
            state = _with_extra(state, errors=errors)
        self._number.after(state, number)
        return state, metrics

    def _train_apart(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Takes a local step in each replica, without communication."""
        replicas, metrics = self.programs["train"](_of_replicas(state), batch)
        state = dataclasses.replace(state, step=replicas.step)
        replicas = dataclasses.replace(replicas, step=())
        # The total of all replicas, as of the last round: processes that saw local
        # counts would act on different numbers.
        metrics["skipped_steps"] = jnp.float32(state.num_skipped)
        return _with_extra(state, replicas=replicas), metrics

    def _send(self, state: TrainState, fragment: int) -> tuple[TrainState, Any]:
        """Averages the outer gradients of a fragment over replicas."""
        outer = state.extra
        outer_gradients = self.programs[f"outer_gradients_{fragment}"]
        grads = outer_gradients(state.master, outer.replicas)
        mean, errors = self.programs[f"mean_{fragment}"](grads, outer.errors[fragment])
        state = _with_extra(state, errors=_replaced(outer.errors, fragment, errors))
        if outer.arriving:
            arriving = _replaced(outer.arriving, fragment, mean)
            state = _with_extra(state, arriving=arriving)
        return state, mean

    def _merge(self, state: TrainState, fragment: int, mean: Any) -> TrainState:
        """Applies the mean of a fragment to the anchor, and the anchor to replicas."""
        outer = state.extra
        merge = self.programs[f"merge_{fragment}"]
        anchor, momentum, replicas = merge(
            state.master, outer.momentum, outer.replicas, mean
        )
        state = dataclasses.replace(state, master=anchor)
        return _with_extra(state, momentum=momentum, replicas=replicas)

    def _end_round(
        self, state: TrainState, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Averages model state, totals and metrics over replicas after a round."""
        replicas, rows = state.extra.replicas, self.state_plan.master
        shared, own, skipped, metrics = self.programs["end_of_round"](
            _shared_at_ends(replicas, self.state_plan), replicas.num_skipped, metrics
        )
        state = dataclasses.replace(
            state,
            model_state=shared[0],
            master=with_followers(shared[1], state.master, rows, "totals"),
            num_skipped=skipped,
        )
        averaged, num_skipped = own
        replicas = dataclasses.replace(
            replicas,
            model_state=averaged[0],
            master=with_followers(averaged[1], replicas.master, rows, "totals"),
            num_skipped=num_skipped,
        )
        return _with_extra(state, replicas=replicas), metrics


def _shared_at_ends(state: TrainState, rows: TrainState) -> tuple[Any, Any]:
    """Arrays that replicas average at the end of a round besides fragments."""
    moved = only_followers(state.master, rows.master, "totals")
    return state.model_state, moved


def _outputs(compiled: jax.stages.Compiled) -> Any:
    """Shapes of a program's results, with shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        compiled.out_info,
        compiled.output_shardings,
    )


def _of_replicas(state: TrainState) -> TrainState:
    """State of the replicas with the common step number, as a local step takes it."""
    return dataclasses.replace(state.extra.replicas, step=state.step)


def _with_extra(state: TrainState, **changes: Any) -> TrainState:
    return dataclasses.replace(state, extra=state.extra._replace(**changes))


def _replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None,
    exchanges: Exchanges,
    rows: TrainState,
) -> dict[str, Any]:
    """Jits the programs of `LocalStepsExecutor` by name."""
    places, of_replicas = shardings(rows), shardings(_of_replicas(rows))
    compiled = functools.partial(jax.jit, compiler_options=step_options(config, plan))
    local_tx = _in_local_steps(tx, exchanges)
    of_replica = make_programs(model, local_tx, plan.of_replica, config, schedule)
    programs = {
        "train": compiled(
            LocalStep(of_replica, model, plan),
            donate_argnums=0,
            out_shardings=(of_replicas, None),
        ),
        "evaluate": compiled(make_programs(model, tx, plan, config).evaluate),
        "end_of_round": jax.jit(
            functools.partial(end_of_round, plan=plan),
            donate_argnums=0,
            out_shardings=(
                _shared_at_ends(places, rows),
                (_shared_at_ends(of_replicas, rows), of_replicas.num_skipped),
                places.num_skipped,
                None,
            ),
        ),
    }
    programs |= _common_steps(model, tx, plan, config, schedule, exchanges, rows)
    rounds = config.communication.rounds
    fragments = make_fragments(plan.master, exchanges.num_fragments)
    for i, fragment in enumerate(fragments):
        outer = make_outer_step(plan, rounds, fragment, tx, exchanges)
        sent = [row.stored for row in outer.exchange.plan.grads]
        by_replica = [
            jax.tree.leaves(of_replicas.master)[p.leaf] for p in fragment.pieces
        ]
        after_merge = places.master, places.extra.momentum, places.extra.replicas
        programs |= {
            f"outer_gradients_{i}": jax.jit(
                outer.outer_gradients, out_shardings=by_replica
            ),
            f"mean_{i}": jax.jit(
                outer.mean,
                donate_argnums=1,
                out_shardings=(sent, places.extra.errors[i]),
            ),
            f"merge_{i}": jax.jit(
                outer.merge, donate_argnums=(0, 1, 2), out_shardings=after_merge
            ),
        }
    return programs


def _in_local_steps(tx: Any, exchanges: Exchanges) -> Any:
    """Optimizer whose update has the local phase bound, if it takes a phase."""
    if exchanges.outer_phase is None:
        return tx
    update = functools.partial(tx.update, phase=LOCAL)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def _common_steps(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None,
    exchanges: Exchanges,
    rows: TrainState,
) -> dict[str, Any]:
    """Programs of phases in which replicas step together, and the reset of errors."""
    if not exchanges.sending:
        return {}
    places = shardings(rows)
    # The exchange sends the shards in which master weights are stored.
    by_shard = dataclasses.replace(plan, grads=plan.master)

    def common_step(phase: Phase) -> Any:
        sent = make_sent(by_shard, phase, config.optimizer.rule)
        of_replica = make_programs(model, tx, plan.of_replica, config, schedule, sent)
        return jax.jit(
            CommonStep(of_replica, model, plan, sent.exchange.feeds_back),
            donate_argnums=0,
            out_shardings=(places, None),
            compiler_options=step_options(config, plan),
        )

    steps = {phase.program: common_step(phase) for phase in exchanges.sending}
    without_errors = jax.jit(
        lambda errors: jax.tree.map(jnp.zeros_like, errors),
        donate_argnums=0,
        out_shardings=places.extra.errors,
    )
    return steps | {"without_errors": without_errors}
