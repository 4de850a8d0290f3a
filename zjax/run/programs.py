"""Builds the uncompiled programs of a run."""

from typing import Any

from zjax.comm.codecs import make_codec
from zjax.optim.phases import Phase, Phases
from zjax.replicas.compressed import ReplicaPrograms
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding.mesh import BATCH_AXES, num_shares
from zjax.sharding.plan import Plan
from zjax.train.exchange import Exchange, Sent
from zjax.train.programs import GradientSettings, Programs, make_gradients
from zjax.train.update import Schedule, make_update
from zjax.typing import Model


def make_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None = None,
    sent: Sent | None = None,
) -> Programs:
    """Builds the uncompiled programs of a run.

    `schedule` is the learning rate by applied step, for the metrics; `sent` is the
    message between replicas, None if the compiler reduces gradients.
    """
    shares = num_shares(plan.mesh, BATCH_AXES)
    precision = config.precision
    settings = GradientSettings(
        model,
        plan,
        resolve_batch(config, shares).num_microbatches,
        reduces_in_float32=precision.reduce_dtype == "float32",
        zero=config.zero,
        pipeline=config.pipeline,
        recomputes=config.model.remat != "none",
        drops_tokens=config.random_ltd is not None,
    )
    update = make_update(
        tx, plan, config.optimizer, precision, schedule, model.stack, sent
    )
    return Programs(make_gradients(settings), update, plan, config.seed)


def make_replica_programs(
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    schedule: Schedule | None,
    phases: Phases,
) -> ReplicaPrograms:
    """Builds the uncompiled programs of a run, one for each phase."""

    def programs(phase: Phase) -> Programs:
        sent = Sent(phase, Exchange(plan, make_codec(phase.codec)))
        return make_programs(model, tx, plan.of_replica, config, schedule, sent)

    by_name = {name: programs(phase) for name, phase in phases.by_name.items()}
    return ReplicaPrograms(by_name, model, plan)
