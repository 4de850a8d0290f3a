"""A layer on many devices, where the compiler places its arrays, and what it sends."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import experts as support
from zjax.moe.dispatch import pad_experts, sort_by_expert
from zjax.moe.experts import Experts, apply_experts
from zjax.moe.router import Router, route
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.settings import schema
from zjax.sharding import mesh as meshes

T, M, E = support.TOKENS, support.WIDTH, support.EXPERTS
ROUTERS = {
    "all-gather": Router(num_experts=E, top_k=2),
    # One token per expert, of at least 8 on a device.
    "all-to-all": Router(
        num_experts=E, drop="position", min_capacity=1, eval_capacity_factor=0.0
    ),
    "tokens-of-experts": Router(num_experts=E, choice="experts"),
}
MESHES = [
    schema.Mesh(data=2, expert=2, tensor=2),
    schema.Mesh(data=1, expert=4, sequence=2),
]


def name_of(mesh):
    sizes = {axis: getattr(mesh, axis) for axis in meshes.AXES}
    return "-".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1)


def make_inputs():
    params = support.init(jax.random.key(0))
    names = "up", "down", "up_bias", "down_bias"
    x, cotangent = jax.random.normal(jax.random.key(1), (2, T, M))
    return x, Experts(*(params[name] for name in names)), params["router"], cotangent


def differentiate(router):
    """Outputs of a layer, and all gradients."""

    def run(x, experts, kernel, cotangent):
        def loss(x, experts, kernel):
            out = apply_experts(x, experts, route(x @ kernel, router))
            return (out * cotangent).sum(), out

        grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return grad(x, experts, kernel)

    return jax.jit(run)


@functools.cache
def on_one_device(router):
    return differentiate(router)(*make_inputs())


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_every_mesh_computes_what_one_device_does(router, mesh):
    """Fails if a bias is added by each device, or channels of another gate are used."""
    with jax.set_mesh(meshes.make_mesh(mesh)):
        found = differentiate(router)(*make_inputs())
    expected = on_one_device(router)
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)


def test_a_device_whose_experts_all_tokens_choose_computes_them_all():
    """Fails if rows above those of a usual load are dropped."""
    x, *rest, cotangent = make_inputs()
    x = jnp.abs(x)
    experts, kernel = rest
    kernel = kernel.at[:, 2:].add(-9.0)  # the first two experts, on the first device
    inputs, run = (x, experts, kernel, cotangent), differentiate(ROUTERS["all-gather"])
    expected = run(*inputs)
    with jax.set_mesh(meshes.make_mesh(MESHES[0])):
        found = run(*inputs)
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=5e-5)


def test_a_device_saves_rows_of_a_usual_load():
    """Fails if memory for the worst load is held until the backward pass."""
    router = ROUTERS["all-gather"]
    mesh = meshes.make_mesh(schema.Mesh(data=1, expert=8))

    def pulled(x, experts, kernel):
        return jax.vjp(
            lambda x: apply_experts(x, experts, route(x @ kernel, router)), x
        )

    with jax.set_mesh(mesh):
        _, pull = jax.eval_shape(pulled, *make_inputs()[:3])
    shapes = {leaf.shape for leaf in jax.tree.leaves(pull)}
    usual = math.ceil(1.25 * T * router.top_k)
    assert (usual, 2 * support.HIDDEN) in shapes


def test_fewer_tokens_than_devices():
    """Fails if gradients of experts are added once for each copy of a token."""
    x, *others, cotangent = make_inputs()
    inputs, run = (x[:3], *others, cotangent[:3]), differentiate(ROUTERS["all-gather"])
    expected = run(*inputs)
    with jax.set_mesh(meshes.make_mesh(schema.Mesh(data=1, expert=8))):
        found = run(*inputs)
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)


def sent_over_expert(router, mesh, num_devices):
    """Elements that the layer and its gradient send over the expert axis."""
    mesh = meshes.make_mesh(mesh, jax.devices()[:num_devices])
    with jax.set_mesh(mesh):
        text = differentiate(router).lower(*make_inputs()).compile().as_text()
    elements = collections.Counter()
    for each in list_collectives(text):
        is_token = "shard_map" in each.op_name and each.op != "all-reduce"
        if is_token and mesh_axes(each.groups, mesh) == ("expert",):
            elements[each.op] += each.elements
    return elements


def test_the_exchange_shrinks_by_the_tensor_degree():
    """Fails if tensor ranks send the same tokens (duplicate token dropping)."""
    router = ROUTERS["all-gather"]
    alone = sent_over_expert(router, schema.Mesh(data=1, expert=2), 2)
    split = sent_over_expert(router, schema.Mesh(data=1, expert=2, tensor=4), 8)
    assert alone == {"all-gather": T * (2 * M + 4), "reduce-scatter": T * (2 * M + 2)}
    assert {op: 4 * size for op, size in split.items()} == alone


def test_the_compiler_sends_rows_where_experts_take_few():
    mesh = schema.Mesh(data=1, expert=4, tensor=2)
    found = sent_over_expert(ROUTERS["all-to-all"], mesh, 8)
    assert found == {"all-to-all": E * (4 * M + 2)}


def test_padded_rows_without_a_token_are_zero():
    dispatch = pad_experts(sort_by_expert(jnp.array([[1], [0], [2]]), 2), 3, 2)
    assert dispatch.rows_of(jnp.ones((3, 1))).ravel().tolist() == [1, 0, 1, 0]
