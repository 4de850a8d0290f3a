"""The engine of replicas: programs by name, and the order in which a step runs them.

The training schedule says what a step exchanges: nothing, gradients or steps of the
optimizer in the program that reads the batch, and parameters by fragment afterwards.
The host waits for no program, so with a delay the mean of a fragment is computed while
local steps run, on devices that run programs side by side; GPUs take programs in turn.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.optim.zero_one_adam import make_message
from zjax.replicas.exchange import Exchange, exchanges_by_program
from zjax.replicas.outer import MomentumStep, OuterStep, end_of_round
from zjax.replicas.state import after_round, averaged_at_ends, of_replicas, with_extra
from zjax.replicas.step import ReplicaStep
from zjax.schedule.exchange import LOCAL, TRAIN, Exchanges, Phase, StepExchange
from zjax.settings.schema import Compressed, LocalSteps, Rule
from zjax.sharding.placement import shardings
from zjax.sharding.plan import Plan
from zjax.train.programs import Programs
from zjax.train.state import TrainState
from zjax.train.update import Sent
from zjax.typing import Batch, Metrics, Model


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """The programs of replicas, and steps as sequences of programs.

    Args:
        make: `make(tx, plan, sent)`, the uncompiled programs of a run; `sent` is the
            message between replicas, or None.
        rule: Update rule, which knows the messages.
    """

    make: Callable[..., Programs]
    model: Model
    tx: Any
    plan: Plan
    rows: TrainState
    exchanges: Exchanges
    rule: Rule
    rounds: LocalSteps

    def programs(self, jit: Callable[..., Any], num_steps: int) -> dict[str, Any]:
        """Jits the programs by name; `jit` has the compiler options of a step.

        Programs are one step for each phase whose message a codec sends, by the name of
        the phase; `train`, a local step or else the step of the last phase; `evaluate`;
        and, with local steps, the programs of an exchange of parameters.
        """
        places = {"donate_argnums": 0, "out_shardings": (shardings(self.rows), None)}
        steps = {x.program: self._together(x) for x in self.exchanges.sending}
        programs = {name: jit(step.together, **places) for name, step in steps.items()}
        if self.exchanges.steps_apart:
            return programs | self._apart(jit)
        last = self.exchanges.at(num_steps).phase.program
        evaluate = jit(steps[last].evaluate)
        return programs | {TRAIN: programs[last], "evaluate": evaluate}

    def _together(self, phase: Phase) -> ReplicaStep:
        """Builds the step of a phase in which replicas send a message."""
        exchange = self._by_program[phase.program]
        takes_phase = isinstance(self.rule, Compressed)
        arguments = {"phase": phase.name} if takes_phase else {}
        sent = Sent(exchange, make_message(self.rule, phase), arguments)
        of_replica = self.make(self.tx, self.plan.of_replica, sent)
        return ReplicaStep(of_replica, self.model, self.plan, exchange.feeds_back)

    @functools.cached_property
    def _by_program(self) -> dict[str, Exchange]:
        """Exchanges of the run by the name of the program."""
        return exchanges_by_program(self.plan, self.exchanges)

    def _outer_step(self, exchange: Exchange) -> OuterStep:
        """Builds the outer step of a fragment."""
        if (phase := self.exchanges.outer_phase) is None:
            return OuterStep(exchange, self.plan, self.rounds)
        return MomentumStep(exchange, self.plan, self.rounds, self.tx, phase)

    def _apart(self, jit: Callable[..., Any]) -> dict[str, Any]:
        """Jits the local step, and the programs that exchange parameters."""
        rows, plan, tx = self.rows, self.plan, self.tx
        places, of_each = shardings(rows), shardings(of_replicas(rows))
        outer = places.extra
        if self.exchanges.outer_phase is not None:
            update = functools.partial(tx.update, phase=LOCAL)
            tx = optax.GradientTransformationExtraArgs(tx.init, update)
        step = ReplicaStep(self.make(tx, plan.of_replica, None), self.model, plan)
        programs = {
            TRAIN: jit(step.apart, donate_argnums=0, out_shardings=(of_each, None)),
            "evaluate": jit(self.make(self.tx, plan, None).evaluate),
            "end_of_round": jax.jit(
                functools.partial(end_of_round, plan=plan),
                donate_argnums=0,
                out_shardings=(
                    averaged_at_ends(places, rows),
                    (averaged_at_ends(of_each, rows), of_each.num_skipped),
                    places.num_skipped,
                    None,
                ),
            ),
            "without_errors": jax.jit(
                lambda errors: jax.tree.map(jnp.zeros_like, errors),
                donate_argnums=0,
                out_shardings=outer.errors,
            ),
        }
        masters = jax.tree.leaves(of_each.master)
        merged = places.master, outer.momentum, outer.replicas
        for i in range(self.exchanges.num_fragments):
            exchange = self._by_program[f"mean_{i}"]
            each = self._outer_step(exchange)
            by_replica = [masters[piece.leaf] for piece in exchange.fragment.pieces]
            mean = [row.stored for row in exchange.rows], outer.errors[i]
            programs |= {
                f"outer_gradients_{i}": jax.jit(
                    each.outer_gradients, out_shardings=by_replica
                ),
                f"mean_{i}": jax.jit(each.mean, donate_argnums=1, out_shardings=mean),
                f"merge_{i}": jax.jit(
                    each.merge, donate_argnums=(0, 1, 2), out_shardings=merged
                ),
            }
        return programs

    def take_step(
        self,
        programs: Mapping[str, Any],
        exchange: StepExchange,
        state: TrainState,
        batch: Batch,
    ) -> tuple[TrainState, Metrics]:
        """Runs the programs of a step, which donate the state."""
        run, mean = programs[exchange.phase.program], None
        if exchange.phase.message == "nothing":
            state, metrics = _step_apart(run, state, batch)
        else:
            state, metrics = run(state, batch)
        if exchange.sent is not None:
            state, mean = _send(programs, state, exchange.sent)
        if exchange.merged is not None:
            # Without a delay the state never stores the mean.
            arriving = state.extra.arriving
            mean = arriving[exchange.merged] if arriving else mean
            state = _merge(programs[f"merge_{exchange.merged}"], state, mean)
        if exchange.ends_round:
            state, metrics = self._end_round(programs, state, metrics)
        if exchange.resets_errors:
            errors = programs["without_errors"](state.extra.errors)
            state = with_extra(state, errors=errors)
        return state, metrics

    def _end_round(
        self, programs: Mapping[str, Any], state: TrainState, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Averages model state, totals and metrics over replicas after a round."""
        rows, replicas = self.rows, state.extra.replicas
        means, (own, skipped), num_skipped, metrics = programs["end_of_round"](
            averaged_at_ends(replicas, rows), replicas.num_skipped, metrics
        )
        state = after_round(state, means, num_skipped, rows)
        replicas = after_round(replicas, own, skipped, rows)
        return with_extra(state, replicas=replicas), metrics


def _step_apart(
    run: Callable[..., Any], state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Takes a local step in each replica, without communication."""
    replicas, metrics = run(of_replicas(state), batch)
    state = dataclasses.replace(state, step=replicas.step)
    # The total of all replicas, as of the last round: processes that saw local counts
    # would act on different numbers.
    metrics["skipped_steps"] = jnp.float32(state.num_skipped)
    return with_extra(state, replicas=dataclasses.replace(replicas, step=())), metrics


def _send(
    programs: Mapping[str, Any], state: TrainState, fragment: int
) -> tuple[TrainState, Any]:
    """Averages the outer gradients of a fragment over replicas."""
    outer = state.extra
    grads = programs[f"outer_gradients_{fragment}"](state.master, outer.replicas)
    mean, errors = programs[f"mean_{fragment}"](grads, outer.errors[fragment])
    changes = {"errors": _replaced(outer.errors, fragment, errors)}
    if outer.arriving:
        changes["arriving"] = _replaced(outer.arriving, fragment, mean)
    return with_extra(state, **changes), mean


def _merge(run: Callable[..., Any], state: TrainState, mean: Any) -> TrainState:
    """Applies the mean of a fragment to the anchor, and the anchor to replicas."""
    outer = state.extra
    anchor, momentum, replicas = run(state.master, outer.momentum, outer.replicas, mean)
    state = dataclasses.replace(state, master=anchor)
    return with_extra(state, momentum=momentum, replicas=replicas)


def _replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
