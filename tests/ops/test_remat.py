import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from zjax.jaxprs.program import walk
from zjax.ops import remat

WIDTH, HIDDEN, TOKENS = 8, 32, 16
WEIGHTS = {"project": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def block(weights, x):
    x = remat.mark(x, remat.INPUT)
    q = remat.mark(x @ weights["project"], remat.PROJECTIONS)
    averages = remat.mark(jax.nn.softmax(q @ q.T) @ q, remat.ATTENTION)
    x = remat.mark(x + jnp.tanh(averages), remat.MIDDLE)
    up = remat.mark(x @ weights["up"], remat.MLP)
    return x + jnp.tanh(up) @ weights["down"]


def kept_shapes(policy):
    """Arrays between forward and backward pass, besides the block's inputs."""
    weights = {name: jnp.ones(shape) for name, shape in WEIGHTS.items()}
    wrapped = remat.recompute(block, policy, in_loop=False)
    x = jnp.ones((TOKENS, WIDTH))
    backward = jax.eval_shape(lambda w, x: jax.vjp(wrapped, w, x)[1], weights, x)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(backward))
    for shape in (*WEIGHTS.values(), x.shape):
        shapes.remove(shape)
    return shapes


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", []),
        ("attention", [(TOKENS, WIDTH)]),
        ("attention_and_mlp", [(TOKENS, WIDTH), (TOKENS, HIDDEN)]),
        ("elementwise", [(TOKENS, WIDTH)] * 3 + [(TOKENS, HIDDEN)]),
    ],
)
def test_policy_keeps_what_it_names(policy, expected):
    """Fails if a policy is ignored or taken for another."""
    assert kept_shapes(policy) == expected


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize(
    "policy", ["full", "attention", "attention_and_mlp", "elementwise"]
)
def test_what_is_kept_goes_to_the_host_and_comes_back(policy, in_loop):
    """Fails if `memory` does nothing, in the program as GPUs are given it."""
    weights = {name: jnp.ones((3, *shape)) for name, shape in WEIGHTS.items()}

    def num_moves(memory):
        run = remat.recompute(block, policy, in_loop=in_loop, memory=memory)

        def loss(weights):
            x = jnp.ones((TOKENS, WIDTH))
            if in_loop:
                x, _ = jax.lax.scan(lambda x, w: (run(w, x), None), x, weights)
                return x.sum()
            for layer in range(3):
                x = run({name: w[layer] for name, w in weights.items()}, x)
            return x.sum()

        traced = jax.jit(jax.grad(loss)).trace(weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        place = '_xla_buffer_placement = "{}"'
        return tuple(text.count(place.format(x)) for x in ("pinned_host", "device"))

    assert num_moves("device") == (0, 0)
    down, up = num_moves("pinned_host")
    of_others = (remat.norm.STATISTICS, remat.SPARSE, remat.EXCHANGED, remat.ROUTED)
    kept = len([name for name in remat.SAVED[policy] if name not in of_others])
    assert down == up == kept * (1 if in_loop else 3)


def test_dots_keep_less_than_everything():
    def num_kept(policy):
        return sum(rows * columns for rows, columns in kept_shapes(policy))

    assert num_kept("full") < num_kept("dots") < num_kept("none")


@pytest.mark.parametrize("policy", ["none", *remat.SAVED])
@pytest.mark.parametrize("in_loop", [False, True])
def test_value_and_gradient_are_those_of_the_block(policy, in_loop):
    weights = {
        name: jax.random.normal(jax.random.key(number), shape)
        for number, (name, shape) in enumerate(WEIGHTS.items())
    }
    x = jax.random.normal(jax.random.key(9), (TOKENS, WIDTH))
    wrapped = remat.recompute(block, policy, in_loop=in_loop)
    found, expected = (
        jax.jit(jax.value_and_grad(lambda w, f=f: f(w, x).sum()))(weights)
        for f in (wrapped, block)
    )
    assert jax.tree.all(
        jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4), found, expected)
    )


@pytest.mark.parametrize(
    ("policy", "memory", "number"),
    [
        ("full", "device", 3),
        ("attention", "device", 3),
        ("elementwise", "device", 0),
        ("elementwise", "pinned_host", 3),
    ],
)
def test_gradients_of_a_block_come_before_those_of_the_one_before(
    policy, memory, number
):
    """Fails if a compiler may leave the gradients of all weights to the end, and keep
    until then what they are made of."""
    run = remat.recompute(block, policy, in_loop=False, memory=memory)
    weights = {name: jnp.ones(shape) for name, shape in WEIGHTS.items()}

    def loss(layers):
        x = jnp.ones((TOKENS, WIDTH))
        for layer in layers:
            x = run(layer, x)
        return x.sum()

    program = jax.make_jaxpr(jax.grad(loss))([weights] * 3)
    shapes = sorted([*WEIGHTS.values(), (TOKENS, WIDTH)])
    found = [
        sorted(x.aval.shape for x in each.invars)
        for each in walk(program)
        if each.primitive.name == "optimization_barrier"
    ]
    assert found.count(shapes) == number


def test_softmax_sums_of_cudnn_are_kept():
    """Fails if the kernel is renamed: attention would run twice unnoticed."""
    kernel = cudnn._dot_product_attention_fwd_p_wrapper
    assert remat.keeps("attention_and_mlp")(kernel)
    assert remat.keeps("attention", "pinned_host")(kernel).dst == "pinned_host"
    assert not remat.keeps("full")(kernel)
    assert not hasattr(remat.keeps("full", "pinned_host")(kernel), "dst")


def test_views_of_parameters_are_not_kept():
    """Fails if a matrix cut in three stays whole from forward to backward pass."""

    def project(fused, x):
        return sum(jnp.tanh(x @ part).sum() for part in jnp.split(fused, 3, axis=1))

    wrapped = jax.checkpoint(project, policy=remat.keeps("none"))
    fused, x = jnp.ones((WIDTH, 3 * HIDDEN)), jnp.ones((TOKENS, WIDTH))
    backward = jax.eval_shape(lambda w, x: jax.vjp(wrapped, w, x)[1], fused, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert (WIDTH, HIDDEN) not in shapes
    assert shapes.count((TOKENS, HIDDEN)) == 3
