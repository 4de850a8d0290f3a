"""Steps that are not finite are named and skipped, and cost no checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.run.test_trainer import broken_batches, own_trainer
from zjax.checkpoint.writer import check_finite
from zjax.errors import NonFiniteError
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan


def test_a_single_batch_that_is_not_finite_is_named(tmp_path):
    """Fails if the batch of the step behind is looked at, whose numbers come late."""
    batches = [*broken_batches(99)][:6]
    batches[3]["x"] = np.full_like(batches[3]["x"], np.nan)
    overrides = "precision.on_nonfinite=stop", "checkpoint.every_steps=0"
    trainer = own_trainer(tmp_path, batches, *overrides)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit()
    trainer.close()
    assert trainer.step == 5
    assert str(error.value).splitlines()[1:] == [
        "batch='x' of 3 arrays are not finite at step 4; check the data of that step, "
        "unless they are intended",
        "gradients='bias, down, up' of 3 arrays are not finite at step 4; look for "
        "overflow or division by 0 in the model and its loss",
    ]


def test_checkpoint_that_falls_on_a_skipped_step_is_saved_after_the_next(tmp_path):
    """Fails if a run is without checkpoints because the steps that save are skipped."""
    whole, broken = next(broken_batches(2)), next(broken_batches(1))
    batches = [broken if step in (2, 4, 5) else whole for step in range(1, 9)]
    trainer = own_trainer(tmp_path, batches, "num_steps=8", "checkpoint.keep_last=9")
    trainer.fit()
    trainer.close()
    assert trainer.store.steps() == (3, 6, 8)


def test_a_state_that_is_not_finite_replaces_no_checkpoint(tmp_path):
    """Fails if weights are saved whose loss is not known yet, or momentum is lost."""
    trainer = own_trainer(tmp_path, [], "checkpoint.keep_last=1", tx=optax.adam(0.1))
    state = trainer.state
    trainer.save()
    after = dataclasses.replace(state, step=state.step + 1)
    weights = {**state.master, "up": state.master["up"].at[0, 0].set(jnp.inf)}
    (adam, *others), nan = state.opt_state, jnp.nan
    moments = {
        **adam.mu,
        "bias": adam.mu["bias"].at[0].set(nan),
        "up": nan * adam.mu["up"],
    }
    opt_state = (adam._replace(mu=moments), *others)
    for changes, names in (
        ({"master": weights}, "master/up"),
        ({"opt_state": opt_state}, "opt_state/0/mu/bias, opt_state/0/mu/up"),
    ):
        trainer.state = dataclasses.replace(after, **changes)
        with pytest.raises(NonFiniteError) as error:
            trainer.save()
        assert str(error.value) == (
            f"state='{names}' is not finite after step 1, and is not saved; go back to "
            "the newest checkpoint, and lower optimizer.peak_learning_rate or look at "
            "the data"
        )
    trainer.close()
    assert trainer.store.steps() == (0,)


def test_infinity_may_be_kept_beside_weights():
    """The best loss so far starts at infinity in optax and in many models."""
    mesh = meshes.make_mesh(schema.Mesh(data=8))
    place = NamedSharding(mesh, PartitionSpec())

    def check(x, memory="device", **changes):
        row = ArrayPlan("w", x.shape, x.dtype, place, place, **changes)
        row = row.stored_in(memory)
        check_finite({name: jax.device_put(x, row.stored)}, {name: row}, 1)

    name = "opt_state/best_value"
    check(jnp.full(3, jnp.inf))
    name = "master/w"
    check(jnp.full(3, jnp.nan), is_frozen=True)
    with pytest.raises(NonFiniteError):
        check(jnp.full(3, jnp.inf))
    with pytest.raises(NonFiniteError):
        check(jnp.full(3, jnp.nan), "pinned_host")
    check(jnp.zeros(3), "pinned_host")
