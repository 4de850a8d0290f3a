"""What is stored of a reference is read for equal weights and equal data alone."""

import json

import jax
import numpy as np
import optax

import zjax
from zjax.data.example_rows import ExampleRows
from zjax.data.prepare import prepare
from zjax.data.store import open_store
from zjax.rl.reference_store import read_sums, write_sums
from zjax.rl.weight_digest import digest_weights

REFERENCE = "0123456789abcdef"


def rows_of(folder, name, completions, length=16):
    """Rows of pairs of a single prompt."""
    records = [
        {"prompt": "a", "chosen": x, "rejected": f"{x}."} for x in completions.split()
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    if not (folder / name).exists():
        settings = {"examples": "pairs", "validation_fraction": 0.0}
        prepare([path], folder / name, **settings)
    return ExampleRows(open_store(str(folder / name), "train"), length)


def test_sums_of_other_completions_are_not_read(tmp_path, caplog):
    rows, others = (rows_of(tmp_path, *x) for x in (("one", "b c d"), ("two", "b c e")))
    sums = -np.arange(6.0)
    write_sums(str(tmp_path), "train", REFERENCE, rows, sums)
    np.testing.assert_array_equal(
        read_sums(str(tmp_path), "train", REFERENCE, rows), sums
    )
    assert read_sums(str(tmp_path), "train", REFERENCE[::-1], rows) is None
    assert caplog.text == ""
    assert read_sums(str(tmp_path), "train", REFERENCE, others) is None
    assert "were computed of other completions" in caplog.text


def test_longer_rows_read_no_sum_that_was_not_computed(tmp_path, caplog):
    rows = rows_of(tmp_path, "one", "b c dddddddd")
    sums = np.array([-1, -2, -3, -4, np.nan, np.nan])
    write_sums(str(tmp_path), "train", REFERENCE, rows, sums)
    assert read_sums(str(tmp_path), "train", REFERENCE, rows) is not None
    longer = rows_of(tmp_path, "one", "b c dddddddd", length=32)
    assert read_sums(str(tmp_path), "train", REFERENCE, longer) is None
    assert "lack examples that fit into the rows now" in caplog.text


def digest_of(weights, *settings, num_devices=1):
    """Digest of a run that starts from given weights."""

    def init(key):
        return {"w": jax.numpy.asarray(weights)}

    def loss_fn(model, batch, key):
        return jax.numpy.mean(model(batch["x"]) ** 2)

    model = (init, lambda params, x: x @ params["w"])
    batch = {"x": np.ones((8, weights.shape[0]), np.float32)}
    devices = jax.devices()[:num_devices]
    config = zjax.load_config({"zero.min_shard_elements": 0}, *settings)
    run = zjax.initialize(
        model, optax.sgd(0.1), loss_fn, batch, config, devices=devices
    )
    return digest_weights(run.state, run.plan)


def test_a_digest_is_that_of_the_weights_on_every_mesh():
    """Fails if padding or the place of a device counts, or the place of a weight does
    not."""
    weights = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    first = digest_of(weights)
    assert digest_of(weights, "zero.stage=3", num_devices=4) == first
    assert digest_of(weights[::-1]) != first
    assert digest_of(weights + np.float32(1e-7)) != first
