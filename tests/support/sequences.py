"""Attention over a sequence in parts: arrays, meshes, and what a program sends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import attention
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.settings import schema
from zjax.sharding import mesh as meshes

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 32, 8, 2, 4
LENGTHS = np.array([19, LENGTH], np.int32)


def make_arrays():
    """Queries, keys, values and a gradient of the averages."""
    rng = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    shapes = [(ROWS, LENGTH, number, SIZE) for number in heads]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def make_documents():
    rng = np.random.default_rng(1)
    return np.sort(rng.integers(0, 4, (ROWS, LENGTH)), 1).astype(np.int32)


def visible(*, causal, documents=None, lengths=None):
    seen = np.ones((ROWS, LENGTH, LENGTH), bool)
    if causal:
        seen &= attention.causal(ROWS, LENGTH)
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None]
    if lengths is not None:
        inside = np.arange(LENGTH) < lengths[:, None]
        seen &= inside[:, :, None] & inside[:, None]
    return seen


def make_mesh(**sizes):
    """At most two batch shards, one per row."""
    num_devices = min(ROWS * math.prod(sizes.values()), jax.device_count())
    return meshes.make_mesh(schema.Mesh(**sizes), jax.devices()[:num_devices])


def compile_with_gradients(attend, mesh):
    """`attend(q, k, v)` and its gradients by `d_out`, for arrays split as in a model.

    Args:
        attend: Of global arrays, under the mesh.
        mesh: With a sequence axis.

    Returns:
        The compiled function of (q, k, v, d_out), and the placement of those.
    """

    def run(q, k, v, d_out):
        out, back = jax.vjp(attend, q, k, v)
        return out, back(d_out)

    place = NamedSharding(mesh, P(meshes.BATCH_AXES, meshes.SEQUENCE, meshes.TENSOR))
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in make_arrays()
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, out_shardings=(place, (place,) * 3)).lower(*shapes)
        return compiled.compile(), place


def compare(attend, mesh, *, order=None, **masks):
    """Holds averages and gradients of `attend` to dense attention in float64.

    Args:
        attend: `attend(q, k, v, documents)`.
        mesh: With a sequence axis.
        order: Positions of the tokens as they are given; as they come if none.
        masks: As `visible` takes them.
    """
    order = np.arange(LENGTH) if order is None else order
    arrays, documents = make_arrays(), masks.get("documents")
    ids = None if documents is None else jnp.array(documents[:, order])
    run, place = compile_with_gradients(lambda q, k, v: attend(q, k, v, ids), mesh)
    out, grads = run(*(jax.device_put(x[:, order], place) for x in arrays))
    expected = attention.attend_with_gradients(*arrays[:3], visible(**masks), arrays[3])
    found = jax.tree.map(lambda x: np.asarray(x)[:, np.argsort(order)], (out, grads))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return out, grads


def sent(compiled, mesh):
    """What a program sends: (op, dtype, elements, axes, times), sorted."""
    found = list_collectives(compiled.as_text())
    return sorted(
        (each.op, each.dtype, each.elements, mesh_axes(each.groups, mesh), each.times)
        for each in found
        if each.group_size > 1
    )
