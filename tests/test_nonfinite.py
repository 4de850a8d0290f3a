"""Steps that are not finite are named and skipped, and cost no checkpoint."""

import numpy as np
import pytest

from tests.test_trainer import broken_batches, own_trainer
from zjax.errors import NonFiniteError


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
