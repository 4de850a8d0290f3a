"""1-bit LAMB takes the steps of explicit workers, in one exchange per step."""

import jax
import numpy as np

from tests.reference.onebit_lamb import OnebitLamb
from tests.support import runs
from tests.support.crossing import is_large
from tests.support.replicas import (
    REPLICAS,
    grads_of_replicas,
    make_batch,
    make_model,
)
from zjax.config import schema
from zjax.initialize import make_run
from zjax.observe.collectives import list_collectives
from zjax.optim.build import make_optimizer

FREEZE, STEPS = 20, 50
RATE, DECAY = 1e-2, 0.1


def make_lamb_run():
    optimizer = schema.Optimizer(
        name="onebit_lamb",
        peak_learning_rate=RATE,
        schedule="constant",
        num_warmup_steps=0,
        freeze_step=FREEZE,
        clip_norm=float("inf"),
        weight_decay=DECAY,
    )
    mesh = schema.Mesh(replica=REPLICAS)
    config = runs.make_config(0, mesh=mesh, num_steps=STEPS, optimizer=optimizer)
    model = make_model()
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:REPLICAS])


def test_fifty_steps_are_those_of_explicit_workers():
    """Fails if layers are not scaled alike, or factors ignore the fresh moments."""
    run = make_lamb_run()
    state = run.state
    params, form = jax.tree.flatten(jax.tree.map(np.asarray, state.master))
    workers = OnebitLamb(
        params,
        [DECAY if p.ndim > 1 else 0 for p in params],
        num_workers=REPLICAS,
        size=state.extra.worker.shape[-1],
        freeze_step=FREEZE,
        rate=RATE,
    )
    factors = []
    for step in range(STEPS):
        batch = make_batch(step)
        now = jax.tree.unflatten(form, workers.params)
        workers.step(jax.tree.leaves(grads_of_replicas(now, batch)))
        state, _ = run.step(state, batch)
        for leaf, expected in zip(
            jax.tree.leaves(state.master), workers.params, strict=True
        ):
            np.testing.assert_allclose(
                leaf, expected, rtol=1e-5, atol=1e-5, err_msg=f"step {step}"
            )
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, leaf)
        factors.append([np.float32(f) for f in workers.factor])
    found = [float(f.squeeze()) for f in jax.tree.leaves(state.opt_state[0].factor)]
    np.testing.assert_allclose(found, factors[-1], rtol=1e-4)
    assert np.ptp(factors, axis=0).min() > 0.1


def test_all_layers_leave_in_one_exchange():
    """Fails if each array is sent by itself."""
    text = make_lamb_run().step.compile(make_batch(0), "compressed").as_text()
    sent = list(filter(is_large, list_collectives(text)))
    assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]
