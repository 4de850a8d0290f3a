"""The state of replicas that step apart.

`master` holds the anchor, the parameters that all replicas share since they were last
merged, so that evaluation, generation and export read it as in any other run. What
differs between replicas is stored with a leading dim of replicas, sharded over
`replica`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.comm.codecs import make_codec
from zjax.config.schema import Config
from zjax.optim.phases import merged_phase
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.sharding.roles import only_followers
from zjax.train.exchange import Exchange
from zjax.train.fragments import Fragment, make_fragments


class Outer(NamedTuple):
    """`TrainState.extra` of a run with local steps.

    Args:
        replicas: TrainState of every replica, arrays [N, ...]; without `step`.
        momentum: float32 momentum of the outer optimizer, in the form of `master`, with
            None for parameters that follow no gradient; an empty tuple if the momentum
            of the replicas serves.
        errors: By fragment, what the codec lost so far.
        arriving: By fragment, the mean outer gradient that was sent last, for a merge
            `delay` steps later; an empty tuple without delay.
    """

    replicas: Any
    momentum: Any
    errors: tuple[Any, ...]
    arriving: tuple[Any, ...]


def make_exchange(plan: Plan, config: Config, fragment: Fragment) -> Exchange:
    """The exchange of a fragment, of the shards that a device stores.

    Args:
        plan: Places every array.
        config: Read for `communication.codec` and `optimizer`.
        fragment: Some of the parameters.
    """
    rows = fragment.rows(jax.tree.leaves(plan.master))
    codec = make_codec(_codec_name(config))
    return Exchange(dataclasses.replace(plan, grads=rows), codec)


def _codec_name(config: Config) -> str:
    if (merged := merged_phase(config)) is not None:
        return merged.codec
    name = config.communication.codec
    return "float32" if name == "none" else name


def outer_rows(rows: Any, plan: Plan, config: Config) -> Any:
    """The plans of a state whose replicas step apart.

    Args:
        rows: TrainState of the plans of one replica.
        plan: Places every array.
        config: Read for `communication` and `optimizer`.
    """
    settings = config.communication
    exchanges = [
        make_exchange(plan, config, fragment)
        for fragment in make_fragments(plan.master, settings.num_fragments)
    ]
    followers = only_followers(plan.master, plan.master, "gradient")
    momentum = jax.tree.map(_float32, followers)
    means = tuple([_float32(r) for r in each.plan.grads] for each in exchanges)
    extra = Outer(
        replicas=jax.tree.map(_by_replica, dataclasses.replace(rows, step=())),
        momentum=momentum if merged_phase(config) is None else (),
        errors=tuple(e.error_rows if e.feeds_back else () for e in exchanges),
        arriving=means if settings.delay else (),
    )
    return dataclasses.replace(rows, opt_state=(), scaler=(), extra=extra)


def first_outer_state(state: Any, rows: Any) -> Any:
    """The state whose replicas start equal.

    Args:
        state: TrainState of one replica.
        rows: Its plans by `outer_rows`.
    """
    number = jax.tree.leaves(rows.extra.replicas)[0].shape[0]
    zeros = jax.tree.map(
        lambda row: jnp.zeros(row.stored_shape, row.dtype),
        rows.extra._replace(replicas=()),
    )
    replicas = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (number, *x.shape)),
        dataclasses.replace(state, step=()),
    )
    extra = zeros._replace(replicas=replicas)
    return dataclasses.replace(state, opt_state=(), scaler=(), extra=extra)


def _by_replica(row: ArrayPlan) -> ArrayPlan:
    mesh = row.stored.mesh
    number = mesh.shape[REPLICA]

    def place(sharding: NamedSharding) -> NamedSharding:
        return sharding.update(spec=P(REPLICA, *sharding.spec))

    return dataclasses.replace(
        row,
        path=f"extra/replicas/{row.path}",
        shape=(number, *row.shape),
        stored=place(row.stored),
        used=place(row.used),
        num_layers=0,
    )


def _float32(row: ArrayPlan) -> ArrayPlan:
    return dataclasses.replace(row, dtype=jnp.dtype("float32"))
