"""The tensor axis must split what it says, and send no more than it has to."""

import dataclasses
import math

import jax

from tests.support import tensor
from tests.support.steps import make_step
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import schema
from zjax.sharding import memory
from zjax.sharding.mesh import abstract_mesh
from zjax.sharding.plan import make_plan

MESH = schema.Mesh(data=2, tensor=4)
STREAM = tensor.ROWS // 2 * tensor.LENGTH * tensor.GPT.embed_size
"""Elements of the whole stream of the rows of one device."""


def test_layer_gathers_and_scatters_the_stream_four_times():
    """Fails if each of several matrices of one input sends its gradient by itself."""
    sent, others = tensor.sent_per_layer(tensor.GPT, MESH, 8)
    assert sent == {"all-gather": 4, "reduce-scatter": 4}
    assert others <= 8 * tensor.GPT.embed_size  # gradients of norms and biases


def test_recomputation_gathers_what_it_multiplies_again():
    model = dataclasses.replace(tensor.GPT, remat="elementwise")
    sent, _ = tensor.sent_per_layer(model, MESH, 8)
    assert sent == {"all-gather": 6, "reduce-scatter": 4}


def test_layer_adds_up_four_times_where_the_length_does_not_divide():
    """Fails if the backward pass adds up what is the same on all devices."""
    sent, _ = tensor.sent_per_layer(tensor.GPT, MESH, 8, length=tensor.LENGTH + 1)
    assert sent == {"all-reduce": 4}


def test_neither_logits_nor_the_table_are_gathered():
    """Fails if the loss or the lookup wants the vocabulary whole."""
    config = tensor.make_config(tensor.GPT, MESH)
    _, _, found = tensor.compile_step(config, 8)
    tokens = STREAM // tensor.GPT.embed_size
    assert max(each.elements for each in found) == STREAM
    of_loss = [
        each
        for each in found
        if each.op == "all-reduce" and each.elements in (tokens, 2 * tokens)
    ]
    # The largest logit and where it is first, the sum of exponentials, the target's.
    assert sum(each.elements * each.times for each in of_loss) == 4 * tokens


def test_device_holds_its_share_of_the_weights():
    """Fails if a matrix stays whole, or a share is more than it should be."""
    model = dataclasses.replace(tensor.GPT, vocab_size=512)
    step = make_step(tensor.make_config(model, MESH))
    width, hidden, layers = model.embed_size, model.mlp_size, model.num_layers
    split = layers * (4 * width**2 + 3 * width + 2 * width * hidden + hidden)
    split += model.vocab_size * width
    whole = layers * (2 * width + 4 * width) + 2 * width + model.max_length * width
    assert memory.num_params(step.plan) == split + whole
    assert memory.tree_bytes(step.plan.compute) == 4 * (split // 4 + whole)


def test_adapters_send_nothing_along_the_tensor_axis():
    """Fails if a product with a factor is summed by itself, or a kernel is gathered.

    Lengths of columns of matrices that are split by rows have one small sum.
    """
    adapters = schema.Lora(rank=4, form="dora")
    sent, others = tensor.sent_per_layer(tensor.LLAMA, MESH, 8, lora=adapters)
    assert sent == {"all-gather": 4, "reduce-scatter": 4}
    assert others <= 512 < tensor.LLAMA.embed_size**2


def test_device_holds_its_share_of_adapters_and_of_frozen_weights():
    """Fails if factors are split otherwise than their kernel, or whole everywhere."""
    config = tensor.make_config(tensor.LLAMA, MESH, lora=schema.Lora(rank=4))
    model = make_model(config)
    mesh = abstract_mesh(MESH, 8)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    rows = {row.path: row for row in jax.tree.leaves(plan.master)}
    width, hidden, layers = 32, 64, tensor.LLAMA.num_layers
    for layer, sizes in {
        "attention/query": (width * 4, 4 * width // 4),
        "attention/out": (width // 4 * 4, 4 * width),
        "mlp/up": (width * 4, 4 * hidden // 4),
        "mlp/down": (hidden // 4 * 4, 4 * width),
    }.items():
        factors = [rows[f"blocks/{layer}/lora/{name}"] for name in "ab"]
        assert [row.device_bytes for row in factors] == [4 * layers * n for n in sizes]
        kernel = rows[f"blocks/{layer}/kernel"]
        assert kernel.is_frozen and kernel.device_bytes == math.prod(kernel.shape)
    moments = [row for row in jax.tree.leaves(plan.opt_state) if row.shape]
    assert moments and all("lora" in row.path for row in moments)
    sums = [row.path for row in jax.tree.leaves(plan.grad_sum)]
    assert sums and all("lora" in path for path in sums)


def kept_bytes(num_layers, mesh, num_devices):
    model = dataclasses.replace(
        tensor.GPT, num_layers=num_layers, layers_per_scan=1, remat="full"
    )
    model = dataclasses.replace(model, embed_size=8, mlp_size=8, max_length=512)
    config = tensor.make_config(model, mesh, length=512)
    _, compiled, _ = tensor.compile_step(config, num_devices)
    return compiled.memory_analysis().temp_size_in_bytes


def test_device_keeps_its_share_of_the_stream():
    """Fails if what a block is recomputed from is whole on every device."""
    mesh, stream = schema.Mesh(data=1, tensor=4), 4 * tensor.ROWS * 512 * 8
    grown = kept_bytes(10, mesh, 4) - kept_bytes(2, mesh, 4)
    assert 8 * stream / 4 <= grown <= 1.1 * 8 * stream / 4
