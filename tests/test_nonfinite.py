"""Arrays that are not finite are named by the step that was not."""

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
        "batch='x' of 3 arrays are not finite at step 4; look at the data of that "
        "step, unless these are meant",
        "gradients='bias, down, up' of 3 arrays are not finite at step 4; look for "
        "what overflows or divides by 0 in the model and its loss",
    ]
