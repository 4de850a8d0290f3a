"""Bytes that programs keep for their gradients, and programs taken apart."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zjax.jaxprs import residuals
from zjax.jaxprs.program import text_of_constant, trace
from zjax_kernels import abstract

ROWS, SIZE = 16, 8
ONE = ROWS * SIZE * 4
"""Bytes of a batch in float32."""
X, W = jnp.ones((ROWS, SIZE)), jnp.ones((SIZE, SIZE))


def kept(function, *inputs, keeps=None, is_exact=False):
    """Residuals in batches; the first input is the carry, all others are free."""
    program = jax.make_jaxpr(function)(*inputs)
    every = [True] * len(inputs)
    forward = residuals.differentiate(program, every)
    given = {"is_exact": is_exact, "keeps": keeps}
    return residuals.residual_bytes(forward, [False, *every[1:]], **given) / ONE


def working(function, *inputs):
    program = jax.make_jaxpr(function)(*inputs)
    every = [True] * len(inputs)
    forward = residuals.differentiate(program, every)
    return residuals.working_bytes(forward, [False, *every[1:]]) / ONE


def test_elementwise_chains_keep_what_they_start_from():
    """Fails if each slope of the chain is kept, as JAX would without a compiler."""

    def run(x, w):
        return jnp.sin(jnp.exp(jnp.tanh(x @ w)))

    assert kept(run, X, W) == 2  # input and result of the product
    assert kept(run, X, W, is_exact=True) > 3


def test_operands_of_products_are_kept():
    def run(x, w):
        return jnp.tanh(x @ w) @ w

    assert kept(run, X, W) == 3


def test_sums_of_products_are_kept_in_place_of_the_terms():
    """Fails if both products are kept for one sum, as of a matrix and its adapter."""

    def run(x, w, v):
        return jnp.exp(x @ w + x @ v)

    assert kept(run, X, W, W) == 2


def test_masks_are_kept_in_place_of_random_bits():
    def run(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    assert kept(run, X, jax.random.key(0)) == 1 / 4


def test_parameters_and_their_casts_are_free():
    def run(x, w):
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    assert kept(run, X, W) == 1 / 2


@pytest.mark.parametrize(("name", "expected"), [("first", 2), ("second", 2), ("", 1)])
def test_policies_keep_what_they_name(name, expected):
    def run(x, w):
        x = checkpoint_name(x, "input")
        first = checkpoint_name(jnp.tanh(x @ w), "first")
        return jnp.sin(checkpoint_name(first @ w, "second"))

    policy = jax.checkpoint_policies.save_only_these_names("input", name)
    assert kept(run, X, W, keeps=policy) == expected
    # The same as JAX itself saves under the policy.
    recomputed = jax.checkpoint(run, policy=policy)
    assert kept(recomputed, X, W, is_exact=True) == expected


def test_residuals_on_the_host_are_not_on_the_device():
    def run(x, w):
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ w), "hidden") @ w)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    recomputed = jax.checkpoint(run, policy=policy)
    assert kept(recomputed, X, W, is_exact=True) == 1  # the input


def test_scans_stack_residuals():
    def run(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    # Operand and result of each, and up to JAX 0.10 the slope: no compiler takes a
    # stacked array apart.
    assert kept(run, X, W) == 5 * (2 if jax.__version_info__ >= (0, 11) else 3)


def test_scans_hold_one_iteration_of_recomputed_values():
    """Fails if the hidden values of all iterations are counted."""
    wide = jnp.ones((SIZE, 4 * SIZE))

    def step(x, w):
        return jnp.tanh(x @ w) @ w.T

    def run(x, w):
        return jax.lax.map(lambda x: jax.checkpoint(step)(x, w), x.reshape(4, -1, SIZE))

    program = jax.make_jaxpr(run)(X, wide)
    assert residuals.recomputed_bytes(program) / ONE == 2 * 4 / 4
    assert residuals.recomputed_bytes(jax.make_jaxpr(step)(X, wide)) == 0


def test_conditionals_work_in_the_largest_branch():
    """Fails if the smaller branch decides, or if branches add up."""

    def multiply(x, w, columns):
        result = jax.ShapeDtypeStruct((ROWS, columns), jnp.float32)
        return abstract.call((x, w), [result], flops=1.0)[0][:, :SIZE]

    def run(x, w):
        few = jax.custom_vjp(lambda x: x)

        def forward(x):
            sizes = (SIZE, 3 * SIZE)
            branches = [lambda x, n=n: multiply(x, w, n) for n in sizes]
            return jax.lax.cond(x.sum() > 0, *branches, x), x

        few.defvjp(forward, lambda saved, grad: (grad,))
        return few(x)

    assert working(run, X, W) == pytest.approx(1 + 3, abs=0.01)


def test_values_count_once_per_device():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=auto)

    def run(x, w):
        return jnp.tanh(x @ w)

    mapped = jax.shard_map(run, in_specs=(P("data"), P()), out_specs=P("data"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert kept(mapped, X, W) == kept(run, X, W) == 2


def test_logits_live_with_their_gradient():
    """Fails if the largest product alone counts, or if a residual does."""

    @jax.custom_vjp
    def loss(x, w):
        return (x @ w).sum()

    def forward(x, w):
        logits = x @ w
        slopes = jax.nn.softmax(logits).astype(jnp.bfloat16)
        return logits.sum(), (slopes @ w.T.astype(jnp.bfloat16), w)

    loss.defvjp(forward, lambda saved, grad: saved)
    wide = jnp.ones((SIZE, 10 * SIZE))
    program = jax.make_jaxpr(loss)(X, wide)
    forward = residuals.differentiate(program, [True, True])
    found = residuals.transient_bytes(forward, [False, True]) / ONE
    assert found == 10 * (1 + 1 / 2)


def test_part_stops_at_what_is_known():
    program, _ = trace(lambda x: jnp.exp(jnp.sin(x)), 1.0)
    middle = program.equations[0].outvars[0]
    part = program.part([middle], program.outputs)
    assert part.inputs == [middle]
    assert float(part(0.0)[0]) == 1.0


def test_programs_that_differ_in_scalars_have_one_form():
    programs = [trace(lambda x, k=k: x * k + 1, 2.0)[0] for k in (3.0, 4.0)]
    (text, first), (other, second) = [each.normal_form() for each in programs]
    assert text == other
    differing = [
        i
        for i, (x, y) in enumerate(zip(first, second, strict=True))
        if text_of_constant(x) != text_of_constant(y)
    ]
    lifted = programs[0].lift(differing)
    assert float(lifted(2.0, 4.0)[0]) == 9.0


def test_programs_that_differ_otherwise_have_two():
    forms = [trace(f, 2.0)[0].normal_form()[0] for f in (jnp.sin, jnp.cos)]
    assert forms[0] != forms[1]
