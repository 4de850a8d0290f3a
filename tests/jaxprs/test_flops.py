"""FLOPs of traced programs against sums by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from zjax.jaxprs.flops import Flops, count_flops
from zjax_kernels import abstract, grouped_matmul

ROWS, SIZE = 4, 8
ONE = 2 * ROWS * SIZE * SIZE
"""FLOPs of one product of a batch with a square matrix."""
X, W = jnp.ones((ROWS, SIZE)), jnp.ones((SIZE, SIZE))


def products(function, *inputs, trained=None):
    """Counts, in products of a batch and a matrix; all inputs are trained if None."""
    with abstract.abstract_kernels():
        program = jax.make_jaxpr(function)(*inputs)
    given = [True] * len(inputs) if trained is None else trained
    return count_flops(program, given)[0].full / ONE


@pytest.mark.parametrize(
    ("trained", "expected"),
    [((False, False), 1), ((True, False), 2), ((False, True), 2), ((True, True), 3)],
)
def test_each_trained_operand_costs_a_product(trained, expected):
    assert products(jnp.matmul, X, W, trained=trained) == expected


def test_what_depends_on_trained_weights_has_a_gradient():
    """The first product has a gradient of its matrix alone, the second of both."""
    assert products(lambda x, w: jnp.tanh(x @ w) @ w, X, W, trained=(False, True)) == 5


def test_stopped_gradients_cost_nothing():
    def run(x, w):
        return jax.lax.stop_gradient(x @ w) @ w

    assert products(run, X, W, trained=(False, True)) == 2 + 2


def test_a_scan_counts_each_iteration():
    """Fails if the length is ignored, or if later iterations read a constant."""

    def run(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    assert products(run, X, W, trained=(False, True)) == 5 * 3


def test_a_scan_reads_a_slice_of_stacked_weights():
    def run(x, stacked):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]

    assert products(run, X, jnp.stack([W] * 3)) == 3 * 3


def test_a_conditional_counts_the_most_expensive_branch():
    def run(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x, lambda: x @ w @ w)

    assert products(run, X, W) == 2 * 3


def test_a_loop_of_unknown_length_counts_once():
    def run(x, w):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ w, x)

    assert products(run, X, W, trained=(False, True)) == 3


def test_recomputation_counts_nothing():
    """Fails if a product that the backward pass repeats counts twice."""

    def run(x, w):
        block = jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)
        return block(block(x))

    assert products(run, X, W) == 4 * 3


def test_functions_with_gradient_rules_are_entered():
    @jax.custom_vjp
    def run(x, w):
        return x @ w

    run.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, grad: saved)
    assert products(jax.jit(run), X, W) == 3


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions(groups):
    """Each output reads a window of 3 x 3 pixels, and the channels of a group."""
    pixels = jnp.ones((2, 6, 6, 8))
    kernel = jnp.ones((3, 3, 8 // groups, 12))
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(2, 2),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    found = products(convolve, pixels, kernel) * ONE
    assert found == 3 * 2 * (2 * 3 * 3 * 12) * 9 * 8 / groups


def test_zeros_of_dilated_inputs_are_not_multiplied():
    """A transposed convolution multiplies each input by the kernel, once."""
    pixels, kernel = jnp.ones((1, 5, 5, 3)), jnp.ones((2, 2, 3, 4))
    run = functools.partial(jax.lax.conv_transpose, strides=(2, 2), padding="VALID")
    assert products(run, pixels, kernel) * ONE == 3 * 2 * (5 * 5 * 3) * (2 * 2 * 4)


def test_rows_of_groups_meet_one_matrix_each():
    stacked, sizes = jnp.ones((3, SIZE, SIZE)), jnp.array([1, 1, 2])
    trained = (True, True, False)
    assert products(jax.lax.ragged_dot, X, stacked, sizes, trained=trained) == 3
    assert products(grouped_matmul, X, stacked, sizes, trained=trained) == 3


def test_gradients_of_groups_sum_over_the_rows_of_one_group():
    """A contracted dim of groups: each row is in one product, not in all three."""
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    outer = functools.partial(
        jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=dims
    )
    sizes = jnp.array([1, 1, 2])
    assert products(outer, X, X, sizes, trained=(False,) * 3) == 1


def multiply(x, w, out):
    out[...] = x[...] @ w[...]


def kernel(**estimate):
    rows = pl.BlockSpec((2, SIZE), lambda i: (i, 0))
    every = pl.BlockSpec((SIZE, SIZE), lambda i: (0, 0))
    return pl.pallas_call(
        multiply,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        grid=(ROWS // 2,),
        in_specs=[rows, every],
        out_specs=rows,
        **estimate,
    )


def test_a_pallas_kernel_counts_each_step_of_the_grid():
    """Fails if the grid is ignored, or if a kernel counts nothing."""
    assert products(kernel(), X, W, trained=(False, False)) == 1
    assert products(kernel(), X, W) == 3


def test_a_pallas_kernel_says_what_it_costs():
    estimate = pl.CostEstimate(flops=7 * ONE, transcendentals=0, bytes_accessed=0)
    run = kernel(cost_estimate=estimate)
    assert products(run, X, W, trained=(False, True)) == 7 * 2


def test_each_device_of_a_mesh_counts():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=auto)
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            jnp.matmul, in_specs=(P("data"), P()), out_specs=P("data")
        )
        assert products(mapped, X, W) == 3


def test_kernels_are_mapped_over_batches():
    """Fails if a batch of calls counts as one, or if a shape is lost."""
    result = jax.ShapeDtypeStruct((SIZE,), jnp.float32)

    def call(x, w):
        return abstract.call((x, w), [result], flops=2.0, causal_flops=1.0)[0]

    mapped = jax.vmap(call, in_axes=(0, None))
    program = jax.make_jaxpr(mapped)(X, W)
    assert program.out_avals[0].shape == (ROWS, SIZE)
    found, _ = count_flops(program, [False, False])
    assert found == Flops(0.0, 1.0 * ROWS, 2.0 * ROWS)


def test_an_abstract_program_is_never_run():
    """Fails if a cached trace of a kernel as one operation reaches a real call."""
    sizes, stacked = jnp.array([ROWS]), W[None]
    run = jax.jit(lambda x: grouped_matmul(x, stacked, sizes))
    with abstract.abstract_kernels():
        assert abstract.NAME in str(jax.make_jaxpr(run)(X))
    assert run(X).tolist() == (X @ W).tolist()
    with abstract.abstract_kernels():
        assert abstract.NAME in str(jax.make_jaxpr(run)(X))
