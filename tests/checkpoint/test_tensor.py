"""Heads that were filled up for the devices leave no trace in what is saved."""

import numpy as np
from safetensors.numpy import load_file

from tests.support import small_run
from zjax.checkpoint.export import export_safetensors

HEADS = (
    "model.num_heads=6",
    "model.num_kv_heads=6",
    "model.embed_size=24",
    "num_steps=2",
)


def kernel_of(trainer):
    return np.asarray(trainer.state.master["blocks"]["attention"]["query"]["kernel"])


def test_other_devices_and_exports_see_the_heads_of_the_model(tmp_path):
    """6 heads on 4 devices are 8 in memory, and 6 wherever they go."""
    split = small_run.make_trainer(tmp_path, *HEADS, "mesh.tensor=4", "mesh.data=2")
    split.fit()
    exported = tmp_path / "model.safetensors"
    export_safetensors(split.store, str(exported))
    stored = kernel_of(split)
    tokens = np.asarray(split.state.master["embedding"]["tokens"])
    split.close()
    alone = small_run.make_trainer(
        tmp_path, *HEADS, "checkpoint.resume=required", num_devices=1
    )
    assert stored.shape[2] == 8
    assert not stored[:, :, 6:].any()
    assert tokens.shape[0] == 64
    assert tokens[:61].any(1).all()
    assert not tokens[61:].any()
    np.testing.assert_array_equal(kernel_of(alone), stored[:, :, :6])
    (found,) = (x for name, x in load_file(exported).items() if "query.kernel" in name)
    np.testing.assert_array_equal(found, stored[:, :, :6])
    alone.close()
