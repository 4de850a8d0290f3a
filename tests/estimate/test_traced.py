"""Costs counted in traced programs: recorded formulas, and models of the user."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import zjax
from tests.estimate.built_in import RECORDED, RUNS
from tests.support import models
from zjax.config import load_config
from zjax.estimate.activations import activation_bytes
from zjax.estimate.traced import run_flops
from zjax.models.build import make_model
from zjax.observe import read_history
from zjax.observe.history import HISTORY
from zjax.settings.axes import axis_sizes
from zjax.settings.batch import BatchSizes
from zjax.sharding.activations import rows_of
from zjax.sharding.placement import abstract_key
from zjax.typing import Loss

ADAPTERS = {"llama-lora"}
"""Runs whose adapters the formula left out."""


@pytest.mark.parametrize("name", RUNS)
def test_flops_of_built_in_models_are_recorded(name):
    """Fails if a product or a pair is missed; 6 N counted norms and biases, too."""
    config, _ = RUNS[name]
    model = make_model(config)
    found = run_flops(model, model.inputs, config) * (1 / config.data.length)
    recorded, tolerance = RECORDED[name], 0.01 if name in ADAPTERS else 0.0013
    assert found.seen == pytest.approx(recorded.half, rel=tolerance)
    assert found.full == pytest.approx(recorded.full, rel=tolerance)


def test_a_scan_over_layers_counts_every_layer():
    """Fails if the whole loss, with its scan and checkpoints, counts other FLOPs."""
    config = load_config(
        {
            "model.num_layers": 4,
            "model.embed_size": 64,
            "model.num_heads": 4,
            "model.max_length": 32,
            "model.layers_per_scan": 2,
            "model.remat": "full",
        }
    )
    model = make_model(config)
    by_parts = run_flops(model, model.inputs, config)
    alone = zjax.Model(model.init, model.loss, model.bind, model.logical)
    assert alone.stack is None
    assert run_flops(alone, model.inputs, config) == by_parts


class Images(linen.Module):
    """A convolutional network with BatchNorm, as a user writes it."""

    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(8, (3, 3), use_bias=False)(x)
        x = jax.nn.relu(linen.BatchNorm(use_running_average=not train)(x))
        x = linen.Conv(16, (3, 3), strides=2, use_bias=False)(x)
        return linen.Dense(10)(jax.nn.relu(x).mean((1, 2)))


def classify(model, batch, key):
    logits = model(batch["image"], train=key is not None)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"], 1)
    return -chosen.mean()


IMAGES = {"image": jnp.ones((6, 16, 16, 3)), "label": jnp.zeros((6, 1), jnp.int32)}


class Layer(nnx.Module):
    """A pre-norm layer of flax.nnx."""

    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Words(nnx.Module):
    """A transformer that scans over layers and recomputes each, as a user writes it."""

    def __init__(self, num_layers, width, vocabulary, rngs):
        self.table = nnx.Embed(vocabulary, width, rngs=rngs)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Layer(width, rngs)

        self.layers = make(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.table.attend(run(self.table(tokens), self.layers))


def predict(model, batch, key):
    logits = jax.nn.log_softmax(model(batch["tokens"]))
    return -jnp.take_along_axis(logits, batch["targets"][..., None], 2).mean()


LAYERS, WIDTH, LENGTH, VOCABULARY = 3, 32, 24, 61
WORDS = {name: jnp.ones((2, LENGTH), jnp.int32) for name in ("tokens", "targets")}


def cnn():
    return zjax.adapt(Images(), classify, IMAGES)


def transformer():
    def make(rngs):
        return Words(LAYERS, WIDTH, VOCABULARY, rngs)

    return zjax.adapt(make, predict, WORDS)


def flops_of_row(model):
    rows = {len(x) for _, x in rows_of(model.inputs, model.entries)}
    assert len(rows) == 1
    return run_flops(model, model.inputs, load_config({})).full


def test_a_cnn_of_linen_has_flops():
    """The first convolution has no gradient of the image."""
    first, second = 16 * 16 * 8 * 9 * 3, 8 * 8 * 16 * 9 * 8
    expected = 2 * (2 * first + 3 * second + 3 * 16 * 10)
    assert flops_of_row(cnn()) == expected


def test_a_transformer_of_nnx_has_flops():
    """Fails if the scan counts one layer, or if recomputation counts."""
    matrices = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    pairs = LAYERS * 2 * LENGTH * WIDTH
    assert flops_of_row(transformer()) == 6 * LENGTH * (matrices + pairs)


def compiled_bytes(model, batch):
    """Temporaries of the compiled gradient of a loss on one CPU."""
    params, state = jax.eval_shape(model.init, abstract_key())

    def loss(params, state, batch, key):
        return model.loss(params, state, batch, key).value

    lowered = jax.jit(jax.grad(loss)).lower(params, state, batch, abstract_key())
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_a_cnn_of_linen_has_a_predicted_peak():
    """Fails if its activations, or gradients between two products, do not count."""
    batch = {"image": jnp.ones((64, 64, 64, 3)), "label": jnp.zeros((64, 1), int)}
    cost = zjax.count(zjax.adapt(Images(), classify, batch), batch)
    found = compiled_bytes(zjax.adapt(Images(), classify, batch), batch)
    assert cost.activation_bytes == pytest.approx(found, rel=0.2)
    first, second = 64 * 64 * 64 * 8, 64 * 32 * 32 * 16
    # Result of the first convolution, operand of the second one, signs of both.
    signs = first + second
    assert cost.saved_bytes == pytest.approx(4 * 2 * first + signs, rel=0.001)


def test_a_transformer_of_nnx_saves_the_input_of_each_layer():
    """Fails if recomputation, or the length of the scan, is ignored."""

    width = 64

    def costs(num_layers):
        def make(rngs):
            return Words(num_layers, width, VOCABULARY, rngs)

        batch = {name: jnp.ones((8, 256), jnp.int32) for name in WORDS}
        model = zjax.adapt(make, predict, batch)
        return zjax.count(model, batch), compiled_bytes(model, batch)

    (few, few_compiled), (more, more_compiled) = costs(2), costs(6)
    stream = 8 * 256 * width * 4
    assert more.saved_bytes - few.saved_bytes == 4 * stream
    assert more_compiled - few_compiled == pytest.approx(4 * stream, rel=0.01)
    assert more.working_bytes == few.working_bytes > 10 * stream
    assert more.params - few.params == 4 * (12 * width**2 + 13 * width)


def test_plain_functions_have_costs_in_the_compute_dtype():
    """Fails if inputs of the loss, or parameters, keep float32."""
    model, batch = models.make_mlp(), models.make_batch()
    wide = zjax.count(model, batch)
    narrow = zjax.count(model, batch, dtype="bfloat16")
    assert wide.params == 2 * models.WIDTH * models.HIDDEN + 7
    assert wide.flops == narrow.flops
    # The pre-activations and the activations; the output is float32 in both.
    hidden = models.BATCH * models.HIDDEN
    assert wide.saved_bytes - narrow.saved_bytes >= 2 * 2 * hidden


def test_a_built_in_model_costs_what_its_run_does():
    config, _ = RUNS["gpt-attention"]
    model, rows = make_model(config), config.microbatch_size
    tokens = jax.ShapeDtypeStruct((rows, config.data.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    cost = zjax.count(model, batch, dtype=config.precision.compute_dtype)
    sizes = BatchSizes(rows, 1, rows)
    found = activation_bytes(config, axis_sizes(config, 1), sizes, model)
    assert cost.activation_bytes == pytest.approx(found)
    assert cost.flops == run_flops(model, model.inputs, config) * rows


def test_collectives_of_a_model_are_counted():
    """Fails if the gradient of a gather, or a recomputed gather, sends nothing."""
    mesh, width, repeats = AbstractMesh((4,), ("tensor",)), 8, 3

    def layer(x, w):
        return jax.lax.all_gather(jnp.tanh(x @ w), "tensor", axis=1, tiled=True)

    def layers(x, w):
        block = jax.checkpoint(lambda x, _: (layer(x, w), None))
        return jax.lax.scan(block, x, None, length=repeats)[0]

    def loss(params, state, x, key):
        mapped = jax.shard_map(
            layers,
            mesh=mesh,
            in_specs=(P(), P(None, "tensor")),
            out_specs=P(),
            check_vma=False,
        )
        mean = jnp.mean(mapped(x, params["w"]))
        return Loss(mean, jnp.ones(()), state, {})

    def init(key):
        return {"w": jnp.zeros((width, width))}, {}

    model = zjax.Model(init, loss, lambda *_: None, lambda _: {"w": None})
    cost = zjax.count(model, jax.ShapeDtypeStruct((16, width), "float32"))
    full = 16 * width * 4
    # Gathered and reduced in turn; the gradient reads no result of the gather again.
    assert cost.exchanged == {"tensor": repeats * 2 * full * 3 / 4}


def test_a_run_of_a_cnn_logs_mfu(tmp_path):
    """Fails if a model of the user logs seconds alone, or counts FLOPs per token."""
    config = {
        "directory": str(tmp_path),
        "num_steps": 5,
        "global_batch_size": 6,
        "observe": {"peak_tflops": 1e-3, "plot": False},
    }
    batches, devices = iter([IMAGES] * 5), jax.devices()[:1]
    trainer = zjax.Trainer(
        config, model=cnn(), tx=optax.sgd(0.1), batches=batches, devices=devices
    )
    trainer.fit()
    last = read_history(tmp_path / HISTORY)[-1]
    rows_per_second = 6 / last["step_seconds"]
    expected = rows_per_second * flops_of_row(cnn()) / 1e9
    assert last["mfu"] == pytest.approx(expected)
