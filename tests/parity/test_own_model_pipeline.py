"""A line of blocks of your own in a pipeline computes what one device computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import lines
from zjax.typing import Auxiliary


def normed(params, x, context, key):
    """Has no value, and no gradient, where its weights are 0."""
    w = params["w"]
    return x + jnp.tanh(x @ (w / jnp.linalg.norm(w))), Auxiliary()


@pytest.mark.parametrize(
    ("stage", "pipeline"),
    [(1, {"kind": "1f1b"}), (3, {"kind": "zb_h1"})],
    ids=["1f1b", "weights-apart"],
)
def test_layers_that_fill_up_the_stages_may_have_no_value(stage, pipeline):
    """Fails if 0 / 0 of layers that are none reaches the others: on four stages five
    layers fill two and a half."""
    train = functools.partial(lines.train, lines.make_model(normed, 5))
    found = train(
        lines.make_batch(),
        mesh={"pipeline": 4, "data": 2},
        zero={"stage": stage, "min_shard_elements": 0},
        pipeline=pipeline,
    )
    wanted = train(lines.make_batch(), jax.devices()[:1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[-1][0] < wanted[0][0]


@pytest.mark.parametrize(
    ("num_layers", "pipeline"),
    [(5, {"kind": "1f1b"}), (4, {"kind": "zb_h1"})],
    ids=["1f1b, filled up", "weights-apart"],
)
def test_what_blocks_add_to_the_loss_counts(num_layers, pipeline):
    """Fails if auxiliary losses or metrics are lost between stages, or those of layers
    that only fill up a stage are counted."""
    model = lines.make_model(lines.penalised, num_layers)
    train = functools.partial(lines.train, also=("auxiliary_loss", "size"))
    mesh = {"pipeline": 4, "data": 2}
    found = train(model, lines.make_batch(), mesh=mesh, pipeline=pipeline)
    wanted = train(model, lines.make_batch(), jax.devices()[:1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    plain = lines.make_model(lines.block, num_layers)
    without = lines.train(plain, lines.make_batch(), jax.devices()[:1])
    assert wanted[0][0] > 1.1 * without[0][0]


@jax.custom_vjp
def softmax(x, mask):
    return softmax_forward(x, mask)[0]


def softmax_forward(x, mask):
    total = jax.nn.logsumexp(x, -1, where=mask > 0, keepdims=True)
    return exponentials(x, mask, total), (x, mask, total)


def exponentials(x, mask, total):
    return jnp.exp(jnp.where(mask > 0, x - total, -jnp.inf))


def softmax_backward(kept, cotangent):
    """As attention does: exponentials again, from the logarithm of their sum."""
    found = exponentials(*kept)
    mean = (found * cotangent).sum(-1, keepdims=True)
    return found * (cotangent - mean), jnp.zeros_like(found)


softmax.defvjp(softmax_forward, softmax_backward)


def masked_embed(params, batch, key):
    mask = batch["mask"]
    return jnp.where(mask > 0, batch["x"] @ params["embed"], 200), mask


def masked(params, x, mask, key):
    w = params["w"]
    x = x + jnp.where(mask > 0, jnp.tanh(softmax(x + w[:1], mask) @ w), 0)
    return x, Auxiliary()


def masked_head(params, x, batch):
    return lines.head(params, jnp.where(batch["mask"] > 0, x, 0), batch)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_idle_stages_read_what_a_pass_read(schedule):
    """Fails if the logarithm that a microbatch left meets the mask of another: its
    exponential overflows, and times the cotangent 0 it is no number."""
    model = lines.make_model(masked, 8, masked_embed, masked_head)
    columns = np.arange(lines.ROWS)[:, None] % 8
    mask = np.float32(columns != np.arange(lines.WIDTH))
    batch = lines.make_batch() | {"mask": mask}
    settings = {"num_microbatches": 8}
    found = lines.train(
        model,
        batch,
        jax.devices()[:4],
        mesh={"pipeline": 4},
        pipeline={"kind": schedule, "recompute": False},
        **settings,
    )
    wanted = lines.train(model, batch, jax.devices()[:1], **settings)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def rooted(params, x, context, key):
    """Has no gradient where a row is 0."""
    w = params["w"]
    size = jnp.sqrt((x**2).sum(-1, keepdims=True))
    return x + jnp.tanh(size * x @ w), Auxiliary()


KEPT = {"recompute": False}


PADDED = {
    "microbatches": (0, {"kind": "1f1b"}, {}, np.s_[::2]),
    "device-2": (2, {"kind": "interleaved", **KEPT}, {"data": 2}, np.s_[:8]),
    "part-3": (3, {"kind": "zb_h1"}, {"data": 2}, np.s_[1:8:2]),
    "device-3": (3, {"kind": "gpipe", **KEPT}, {"data": 2}, np.s_[8:]),
    "all-3": (3, {"kind": "1f1b"}, {"data": 2}, np.s_[:]),
}
"""Stage, schedule and mesh, and the rows that count nothing."""


@pytest.mark.parametrize("case", PADDED)
def test_padding_alone_may_have_no_gradient(case):
    """Fails if 0 / 0 of microbatches without weight reaches the others: of all devices,
    of one device, or all that one device or any has. Row i is in microbatch i mod 4."""
    stage, pipeline, mesh, weightless = PADDED[case]
    model = lines.make_model(rooted, 4)
    batch = lines.make_batch()
    batch["weights"][weightless] = 0
    devices = jax.devices()[: 4 if mesh else 2]
    found = lines.train(
        model,
        batch | {"x": np.where(batch["weights"][:, None] > 0, batch["x"], 0)},
        devices,
        mesh={"pipeline": 2, **mesh},
        zero={"stage": stage, "min_shard_elements": 0} if stage else {"stage": 0},
        pipeline=pipeline,
    )
    wanted = lines.train(model, batch, jax.devices()[:1])
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_microbatches_of_very_unequal_weight_keep_the_range_of_float16():
    """Fails if gradients are counted in the smallest weight, which takes them past what
    float16 holds."""
    model = lines.make_model(normed, 2)
    batch = lines.make_batch()
    batch["weights"][1::4] = 100_000
    precision = {"compute_dtype": "float16", "loss_scale": {"initial": 16.0}}
    settings = {"mesh": {"pipeline": 2}, "precision": precision}
    found = lines.train(model, batch, jax.devices()[:2], **settings)
    wanted = lines.train(model, batch, jax.devices()[:1])
    np.testing.assert_allclose(found, wanted, rtol=1e-2)
    assert wanted[-1][0] < wanted[0][0]
