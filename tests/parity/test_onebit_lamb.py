"""1-bit LAMB takes the steps of explicit workers, in one exchange per step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.reference.onebit_lamb import OnebitLamb
from tests.support import rules, runs
from tests.support.crossing import is_large
from tests.support.replicas import (
    REPLICAS,
    grads_of_replicas,
    make_batch,
    make_model,
)
from tests.support.trees import assert_close
from zjax.observe.collectives import list_collectives
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run
from zjax.settings import schema

FREEZE, STEPS = 20, 50
RATE, DECAY = 1e-2, 0.1


def make_lamb_run(name="onebit_lamb"):
    optimizer = rules.optimizer(
        name,
        "constant",
        freeze_step=FREEZE,
        num_warmup_steps=0,
        peak_learning_rate=RATE,
        clip_norm=float("inf"),
        weight_decay=DECAY,
    )
    mesh = schema.Mesh(replica=REPLICAS)
    config = runs.make_config(0, mesh=mesh, num_steps=STEPS, optimizer=optimizer)
    model = make_model()
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:REPLICAS])


def make_workers(state):
    flat, unravel = ravel_pytree(jax.tree.map(np.asarray, state.master))
    decayed = jax.tree.map(lambda x: jnp.full(x.shape, x.ndim > 1, "f4"), state.master)
    workers = OnebitLamb(
        flat,
        ravel_pytree(decayed)[0],
        [x.size for x in jax.tree.leaves(state.master)],
        num_workers=REPLICAS,
        size=state.extra.worker.shape[-1],
        freeze_step=FREEZE,
        rate=RATE,
        decay=DECAY,
        clip=np.inf,
    )
    return workers, unravel


def test_fifty_steps_are_those_of_explicit_workers():
    """Fails without trust ratios, or with the norms of the steps that are taken."""
    run = make_lamb_run()
    state = run.state
    workers, unravel = make_workers(state)
    for step in range(STEPS):
        batch = make_batch(step)
        grads = grads_of_replicas(unravel(workers.params), batch)
        own = [jax.tree.map(lambda g, i=i: g[i], grads) for i in range(REPLICAS)]
        workers.step(np.stack([ravel_pytree(g)[0] for g in own]))
        state, _ = run.step(state, batch)
        np.testing.assert_allclose(
            ravel_pytree(state.master)[0],
            workers.params,
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"step {step}",
        )
        for leaf in jax.tree.leaves(state.master):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, leaf)
    kept = [float(x.squeeze()) for x in jax.tree.leaves(state.opt_state[2].norm)]
    np.testing.assert_allclose(kept, workers.norms, rtol=1e-4)


def test_the_warm_up_is_lamb():
    states = []
    for name in ("lamb", "onebit_lamb"):
        run = make_lamb_run(name)
        state = run.state
        for step in range(FREEZE):
            state, _ = run.step(state, make_batch(step))
        states.append(jax.tree.map(np.asarray, state.master))
    assert_close(*states, rtol=0, atol=1e-6)


def test_all_layers_leave_in_one_exchange():
    """Fails if each array is sent by itself."""
    text = make_lamb_run().step.compile(make_batch(0), "compressed").as_text()
    sent = list(filter(is_large, list_collectives(text)))
    assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]
