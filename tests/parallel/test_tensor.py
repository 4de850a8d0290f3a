"""Split matrices by themselves, and inside of what others have split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support import tensor as small
from zjax import generate
from zjax.models.build import make_model
from zjax.models.layers import Attention
from zjax.models.stack import Decoder
from zjax.parallel import tensor
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.layers import layers_of

LENGTH, WIDTH, HIDDEN = 8, 6, 10


def make_arrays():
    """Whole numbers, whose sums are exact in any order."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(4, LENGTH, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.randint(k, s, -1, 2).astype(jnp.float32) for k, s in pairs]


def product(x, kernel):
    return jnp.tensordot(x, kernel, 1)


def transform(x, up, gate, down):
    up, gate = (tensor.fill_up(kernel, 1) for kernel in (up, gate))
    ups = tensor.multiply_columns([product] * 2, x, [(up,), (gate,)])
    y = tensor.multiply_rows(product, ups[0] * ups[1], (tensor.fill_up(down, 0),))
    return tensor.join_stream(y)


def gradients(x, *kernels):
    return jax.grad(lambda *args: jnp.sum(transform(*args) ** 2), range(4))(x, *kernels)


@pytest.mark.parametrize(
    ("mesh", "length"),
    [
        pytest.param(schema.Mesh(tensor=4, data=2), LENGTH, id="data"),
        pytest.param(schema.Mesh(tensor=4, data=2), LENGTH - 1, id="whole-length"),
        pytest.param(schema.Mesh(tensor=2, sequence=2), LENGTH, id="sequence"),
        pytest.param(schema.Mesh(tensor=2, sequence=2), 6, id="length-of-sequence"),
        pytest.param(schema.Mesh(tensor=8), LENGTH, id="few-in-each-share"),
    ],
)
def test_products_and_their_gradients_are_those_of_one_device(mesh, length):
    x, *kernels = make_arrays()
    x = x[:, :length]
    expected = gradients(x, *kernels)
    with jax.set_mesh(meshes.make_mesh(mesh)):
        found = jax.jit(gradients)(x, *kernels)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_a_split_table_and_their_gradients(deterministic):
    """A table of 11 rows over 4 devices, of which one is looked up from every one."""
    table = jax.random.normal(jax.random.key(0), (11, WIDTH))
    indices = jnp.array([[0, 10, 3, 3], [5, 8, 2, 0]])

    def loss(table):
        return jnp.sum(tensor.look_up(table, indices, deterministic) ** 3)

    expected = jax.grad(lambda table: jnp.sum(table[indices] ** 3))(table)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(tensor=4, data=2))):
        found = jax.jit(jax.grad(loss))(table)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_block_runs_inside_a_pipeline():
    """Whoever splits the layers by hand leaves the tensor axis to the block."""
    config = small.make_config(small.GPT, schema.Mesh(pipeline=2, tensor=2, data=2))
    model = make_model(config)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, small.make_batch(config, 0))
    stack = model.stack
    embed, (layers,), _ = stack.split(params)
    x, context = jax.jit(lambda *args: stack.embed(*args, None))(embed, batch)
    block = stack.segments[0].block

    def stage_loss(layers, x):
        layer = jax.tree.map(lambda leaf: leaf[0], layers)
        return jnp.sum(block(layer, x, context, None)[0] ** 2)

    def of_stage(layers, x):
        value, grads = jax.value_and_grad(stage_loss)(layers, x)
        return value[None], grads

    blocks = layers_of(layers, config.model.num_layers)
    alone = [jax.tree.map(lambda leaf: leaf[None], one) for one in blocks]
    expected = [jax.jit(jax.value_and_grad(stage_loss))(one, x) for one in alone]
    mesh = meshes.make_mesh(config.mesh)
    mapped = jax.shard_map(
        of_stage,
        mesh=mesh,
        in_specs=(P("pipeline"), P()),
        out_specs=P("pipeline"),
        axis_names={"pipeline"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        values, grads = jax.jit(mapped)(layers, x)
    for stage, (value, grad) in enumerate(expected):
        np.testing.assert_allclose(values[stage], value, rtol=1e-5)
        for one, other in zip(
            jax.tree.leaves(grads), jax.tree.leaves(grad), strict=True
        ):
            np.testing.assert_allclose(one[stage], other[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "heads", [(28, 28), (8, 2)], ids=["28-heads", "copied-kv-heads"]
)
def test_generation_is_that_of_one_device(heads):
    model = dataclasses.replace(
        small.LLAMA, num_heads=heads[0], num_kv_heads=heads[1], embed_size=112
    )
    decoder = Decoder(model, rngs=nnx.Rngs(0))
    prompts = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    expected = generate(decoder, prompts, max_new_tokens=4)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(tensor=8))):
        found = generate(decoder, prompts, max_new_tokens=4)
    np.testing.assert_array_equal(found, expected)


def test_heads_that_fill_up_are_zero_and_stay_so():
    """Fails if a head that is none gives something, or if its gradient is kept."""
    model = dataclasses.replace(small.GPT, num_heads=28, num_kv_heads=28, embed_size=56)
    attention = Attention(model, out_std=1.0, rngs=nnx.Rngs(0))
    graph, params = nnx.split(attention)
    params = jax.tree.map(lambda x: x + 0.1, params)
    x = jax.random.normal(jax.random.key(1), (2, 8, 56))
    seen = []

    def attend(q, k, v, _):
        seen.append(q.shape[2])
        averages = jax.nn.dot_product_attention(q, k, v)
        return averages, averages

    def run(params):
        return nnx.merge(graph, params)(x, None, attend)

    def loss(params):
        return jnp.mean(run(params)[0] ** 2)

    with jax.set_mesh(meshes.make_mesh(schema.Mesh(tensor=8))):
        y, averages = jax.jit(run)(params)
        grads = jax.jit(jax.grad(loss))(params)
    assert seen == [32, 32]
    assert not averages[:, :, 28:].any()
    assert averages[:, :, :28].all()
    np.testing.assert_allclose(y, run(params)[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(
        jax.tree.leaves(grads), jax.tree.leaves(jax.grad(loss)(params)), strict=True
    ):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
