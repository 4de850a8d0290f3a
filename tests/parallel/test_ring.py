"""Ring attention equals dense attention, sends what the paper says, and is balanced."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import sequences as small
from zjax.jaxprs.program import programs_in
from zjax.ops import remat
from zjax.parallel import ring
from zjax.parallel.ring import ring_attention, zigzag

ELEMENTS = small.LENGTH * small.KV_HEADS * small.SIZE
"""Of the keys of one row."""


def make_ring(**options):
    def attend(q, k, v, documents=None):
        return ring_attention(q, k, v, segment_ids=documents, **options)

    return attend


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_ring_is_dense_attention(causal, masked):
    """Tokens in zigzag, put back in order, are what tokens in order would give."""
    masks = {"documents": small.make_documents(), "lengths": small.LENGTHS}
    masks = masks if masked else {}
    lengths = {"lengths": jnp.array(small.LENGTHS)} if masked else {}
    order = zigzag(small.LENGTH, 4) if causal else None
    attend = make_ring(causal=causal, **lengths)
    mesh = small.make_mesh(sequence=4)
    out, grads = small.compare(attend, mesh, order=order, causal=causal, **masks)
    if masked:
        order = np.arange(small.LENGTH) if order is None else order
        padding = order >= small.LENGTHS[0]
        assert padding.any()
        for x in (out, *grads):
            assert not np.asarray(x)[0, padding].any()


def test_scores_exist_for_few_keys_at_a_time(monkeypatch):
    monkeypatch.setattr(ring, "CHUNK", 2)
    attend, mesh = make_ring(causal=True), small.make_mesh(sequence=4)
    small.compare(attend, mesh, order=zigzag(small.LENGTH, 4), causal=True)
    per_device = small.LENGTH // 4
    (largest,) = largest_products(attend, mesh)
    assert largest == small.HEADS * per_device * small.SIZE  # the queries, no scores


@pytest.mark.parametrize("causal", [True, False])
def test_keys_go_round_once_and_come_home_with_their_gradients(causal):
    """Fails if the compiler keeps what came in the forward pass for the other one."""
    mesh = small.make_mesh(sequence=4)
    compiled, _ = small.compile_with_gradients(make_ring(causal=causal), mesh)
    rounds = 2 * 3 + (2 * 3 + 2 * 4)  # k and v; again, with dk and dv
    a_part = ELEMENTS // 4  # of the one row that a device has
    assert (
        small.sent(compiled, mesh)
        == [("collective-permute", "f32", a_part, ("sequence",), 1)] * rounds
    )


def program_of(function, dtype):
    """A program of q, k and v before it is compiled."""
    q, k, v, _ = (jnp.asarray(x, dtype) for x in small.make_arrays())
    with jax.set_mesh(small.make_mesh(sequence=4)):
        return str(jax.make_jaxpr(function)(q, k, v))


def permuted(program):
    """Dtypes of what goes round."""
    return re.findall(r"(\w+)\[[\d,]*\] = ppermute", program)


@pytest.mark.parametrize("causal", [True, False])
def test_sums_are_float32_and_go_round_so(causal):
    """Fails if averages or gradients are rounded at each of the devices, or what the
    backward pass knows of each query is rounded at all."""

    def total(q, k, v):
        return jnp.sum(make_ring(causal=causal)(q, k, v), dtype=jnp.float32)

    program = program_of(jax.grad(total, (0, 1, 2)), jnp.bfloat16)
    assert sorted(permuted(program)) == ["bf16"] * (2 * 3 + 2 * 3) + ["f32"] * (2 * 4)
    held = re.findall(r"(.*) = optimization_barrier", program)
    heads = rf"(\w+)\[[\d,]*,{small.HEADS},{small.SIZE}\]"
    assert {x for line in held for x in re.findall(heads, line)} == {"f32"}
    of_queries = f"[{small.ROWS},{small.LENGTH},{small.HEADS}]"
    assert f"f32{of_queries}" in program
    assert f"bf16{of_queries}" not in program


def test_averages_that_a_policy_keeps_send_no_keys_again():
    """Fails if a block that keeps what attention returns goes round once more."""
    policy = remat.keeps("attention")

    def total(q, k, v):
        return jnp.sum(jax.checkpoint(make_ring(causal=True), policy=policy)(q, k, v))

    program = program_of(jax.grad(total, (0, 1, 2)), jnp.float32)
    assert len(permuted(program)) == 2 * (3 + 3 + 4)


def test_every_step_after_the_first_costs_two_chunks_by_one():
    """Fails if masked pairs are computed, or if devices choose between programs."""
    size, head = 4, small.HEADS * small.SIZE
    chunk = small.LENGTH // (2 * size)
    mesh = small.make_mesh(sequence=size)
    products = dot_products(make_ring(causal=True), mesh)
    diagonal = 2 * 2 * head * (2 * chunk) ** 2  # scores and averages, 2 flops each
    assert sum(products) == diagonal + (size - 1) * 2 * 2 * head * 2 * chunk**2
    everything = sum(dot_products(make_ring(causal=False), mesh))
    assert sum(products) / everything == (size + 1) / (2 * size)


def dot_products(attend, mesh):
    """Flops of each product of one device and one row."""
    return [
        2 * np.prod(x.shape) * np.prod([y.shape[i] for i in params[0][1]]) // 1
        for x, y, params in inner_products(attend, mesh)
    ]


def largest_products(attend, mesh):
    """Elements of the largest result of a product."""
    return {max(int(np.prod(x.shape)) for x, *_ in inner_products(attend, mesh))}


def inner_products(attend, mesh):
    q, k, v, _ = (
        jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in small.make_arrays()
    )
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(attend)(q, k, v)
    return list(_walk(jaxpr))


def _walk(program):
    for equation in program.eqns:
        assert equation.primitive.name not in ("cond", "while"), "not the same for all"
        if equation.primitive.name == "dot_general":
            params = equation.params["dimension_numbers"]
            yield equation.outvars[0].aval, equation.invars[1].aval, params
        turns = equation.params.get("length", 1)
        for each in programs_in(equation):
            yield from list(_walk(each)) * turns
