import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.reference import token_loss as reference
from zjax.ops.cross_entropy import Teacher, token_loss
from zjax.settings import schema
from zjax.sharding import mesh as meshes

RNG = np.random.default_rng(0)
ROWS, LENGTH, WIDTH, VOCAB = 4, 5, 6, 11
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32)
BIAS = RNG.normal(size=VOCAB).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
WEIGHTS = RNG.choice([0.0, 0.5, 1.0], size=(ROWS, LENGTH)).astype(np.float32)

STATIC = ("z_loss", "chunk_tokens", "num_batch_shards", "num_length_shards")
summed = jax.jit(token_loss, static_argnames=STATIC)
CUTS = pytest.mark.parametrize(
    ("chunk_tokens", "num_batch_shards"),
    [
        pytest.param(0, 1, id="whole"),
        pytest.param(7, 1, id="chunk-divides-nothing"),
        pytest.param(3, 2, id="two-shares"),
        pytest.param(100, 4, id="chunk-above-all"),
    ],
)


@CUTS
def test_sums_equal_the_reference(chunk_tokens, num_batch_shards):
    found = summed(
        jnp.array(HIDDEN),
        jnp.array(HEAD),
        jnp.array(TARGETS),
        jnp.array(WEIGHTS),
        bias=jnp.array(BIAS),
        z_loss=0.1,
        chunk_tokens=chunk_tokens,
        num_batch_shards=num_batch_shards,
    )
    expected = reference.token_loss(HIDDEN, HEAD, BIAS, TARGETS, WEIGHTS, 0.1)
    np.testing.assert_allclose(found[:3], expected, rtol=1e-5)
    assert found.divergence_sum is None


@CUTS
@pytest.mark.parametrize("argument", ["hidden", "head", "bias"])
def test_gradients_equal_finite_differences(argument, chunk_tokens, num_batch_shards):
    arguments = {"hidden": HIDDEN, "head": HEAD, "bias": BIAS}
    towards = RNG.normal(size=arguments[argument].shape)

    def reference_at(distance):
        moved = arguments | {argument: arguments[argument] + distance * towards}
        moved = {name: moved[name] for name in ("hidden", "head", "bias")}
        return reference.token_loss(*moved.values(), TARGETS, WEIGHTS, 0.1)[0]

    def loss(value):
        given = {name: jnp.array(array) for name, array in arguments.items()}
        return (
            3.0
            * token_loss(
                **(given | {argument: value}),
                targets=jnp.array(TARGETS),
                weights=jnp.array(WEIGHTS),
                z_loss=0.1,
                chunk_tokens=chunk_tokens,
                num_batch_shards=num_batch_shards,
            ).loss_sum
        )

    gradient = jax.jit(jax.grad(loss))(jnp.array(arguments[argument]))
    found = np.sum(gradient * towards)
    expected = 3.0 * (reference_at(1e-4) - reference_at(-1e-4)) / 2e-4
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_cap_bounds_the_logits_and_their_gradients():
    """Against a loss of logits that are all there, and its automatic gradient."""

    def plain(hidden, head):
        logits = 2.0 * jnp.tanh(jnp.einsum("blm,vm->blv", hidden, head) / 2.0)
        found = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(found, TARGETS[..., None], -1)[..., 0]
        squares = jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum((losses + 0.1 * squares) * WEIGHTS)

    def capped(hidden, head):
        given = jnp.array(TARGETS), jnp.array(WEIGHTS)
        return token_loss(
            hidden, head, *given, cap=2.0, z_loss=0.1, chunk_tokens=7
        ).loss_sum

    arrays = jnp.array(HIDDEN), jnp.array(HEAD)
    found = jax.jit(jax.value_and_grad(capped, (0, 1)))(*arrays)
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [0, 3])
def test_parts_of_each_sequence_add_up(chunk_tokens):
    """Fails if targets or weights part from the states they belong to."""

    def gradients(**shares):
        def loss(hidden, head, bias):
            return summed(
                hidden,
                head,
                jnp.array(TARGETS[:, :4]),
                jnp.array(WEIGHTS[:, :4]),
                bias=bias,
                chunk_tokens=chunk_tokens,
                **shares,
            ).loss_sum

        given = map(jnp.array, (HIDDEN[:, :4], HEAD, BIAS))
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*given)

    found = gradients(num_batch_shards=2, num_length_shards=2)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(gradients()), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@CUTS
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_teacher_adds_its_divergence(temperature, chunk_tokens, num_batch_shards):
    """Fails if the two are swapped, or the gradient lacks a temperature."""
    rng = np.random.default_rng(1)
    hidden = jnp.array(rng.normal(size=(ROWS, LENGTH, 3)), jnp.float32)
    head = jnp.array(rng.normal(size=(VOCAB, 3)), jnp.float32)
    weight, temperature = jnp.float32(0.7), jnp.float32(temperature)
    teacher = Teacher(hidden, head, weight, temperature)
    given = tuple(map(jnp.array, (HIDDEN, HEAD, BIAS)))
    rest = jnp.array(TARGETS), jnp.array(WEIGHTS)

    def divergence(x, matrix, bias):
        logits = x @ matrix.T + bias[None, None]
        own = jax.nn.log_softmax(logits / temperature)
        target = jax.nn.log_softmax(hidden @ head.T / temperature)
        kl = jnp.sum(jnp.exp(target) * (target - own), -1)
        return temperature**2 * jnp.sum(kl * rest[1])

    def expected(x, matrix, bias):
        plain = summed(x, matrix, *rest, bias=bias, z_loss=0.1).loss_sum
        return plain + weight * divergence(x, matrix, bias)

    def found(x, matrix, bias):
        cut = {"chunk_tokens": chunk_tokens, "num_batch_shards": num_batch_shards}
        return summed(
            x, matrix, *rest, bias=bias, teacher=teacher, z_loss=0.1, **cut
        ).loss_sum

    results = [
        jax.value_and_grad(f, argnums=(0, 1, 2))(*given) for f in (found, expected)
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    sums = summed(*given[:2], *rest, bias=given[2], teacher=teacher)
    np.testing.assert_allclose(sums.divergence_sum, divergence(*given), rtol=1e-5)


def loss_and_gradients(targets, weights, head=HEAD):
    def loss(hidden, head):
        sums = summed(hidden, head, jnp.array(targets), jnp.array(weights))
        return sums.loss_sum, sums

    grads, sums = jax.grad(loss, (0, 1), has_aux=True)(jnp.array(HIDDEN), head)
    return [*sums[:3], *grads]


def test_ignored_targets_have_no_weight():
    """Fails if -100 counts, as a token of logit 0."""
    is_ignored = RNG.random(TARGETS.shape) < 0.4
    found = loss_and_gradients(np.where(is_ignored, -100, TARGETS), WEIGHTS)
    wanted = loss_and_gradients(TARGETS, np.where(is_ignored, 0, WEIGHTS))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_other_targets_have_no_loss_unless_they_do_not_count(target):
    targets, weights = TARGETS.copy(), np.ones_like(WEIGHTS)
    targets[1, 2] = target
    assert np.isnan(loss_and_gradients(targets, weights)[:2]).all()
    weights[1, 2] = 0
    assert np.isfinite(np.concatenate(loss_and_gradients(targets, weights), None)).all()


def test_of_equal_scores_the_first_token_is_the_most_likely():
    """Fails if a model that scores nothing is always right."""
    sums = loss_and_gradients(TARGETS, WEIGHTS, head=jnp.zeros((VOCAB, WIDTH)))
    assert sums[2] == WEIGHTS[TARGETS == 0].sum()


def test_bfloat16_states_give_a_float32_loss():
    """Fails if the logits or their sums are rounded to bfloat16."""
    narrow = jnp.bfloat16(HIDDEN), jnp.bfloat16(HEAD)
    arguments = jnp.array(TARGETS), jnp.array(WEIGHTS)
    found = summed(*narrow, *arguments)
    wide = summed(*(x.astype(jnp.float32) for x in narrow), *arguments)
    np.testing.assert_allclose(found.loss_sum, wide.loss_sum, rtol=1e-6)
    grads = jax.grad(lambda x, w: summed(x, w, *arguments).loss_sum, (0, 1))(*narrow)
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(1, {"chunk_tokens": 2}, id="chunks"),
        pytest.param(2, {"num_batch_shards": 2}, id="shares"),
        pytest.param(
            2, {"num_batch_shards": 2, "chunk_tokens": 1}, id="chunks-of-shares"
        ),
    ],
)
def test_gradient_of_the_head_is_summed_in_float32(rows, options):
    """Fails if sums of chunks or shares are bfloat16, which has 257 as 256: half of
    512 + 2 is followed by half of 1 + 1."""
    hidden = jnp.ones((rows, 4 // rows, 1), jnp.bfloat16)
    head, bias = jnp.zeros((2, 1), jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)
    targets = jnp.zeros((rows, 4 // rows), jnp.int32)
    weights = jnp.array([512.0, 2.0, 1.0, 1.0]).reshape(targets.shape)

    def loss(head, bias):
        return token_loss(hidden, head, targets, weights, bias=bias, **options).loss_sum

    of_head, of_bias = jax.jit(jax.grad(loss, (0, 1)))(head, bias)
    assert of_head.dtype == of_bias.dtype == jnp.bfloat16
    assert of_head[:, 0].tolist() == of_bias.tolist() == [-258.0, 258.0]


def gradients_of(mesh=None, **options):
    """A jitted function and its abstract arguments."""
    shapes = {"hidden": (16, 64, 8), "head": (2048, 8)}
    shapes |= {"targets": (16, 64), "weights": (16, 64)}

    def loss(hidden, head, targets, weights):
        return token_loss(hidden, head, targets, weights, **options).loss_sum

    def shaped(name):
        dtype = jnp.int32 if name == "targets" else jnp.float32
        axes = None if name == "head" else meshes.DATA
        sharding = mesh and NamedSharding(mesh, PartitionSpec(axes))
        return jax.ShapeDtypeStruct(shapes[name], dtype, sharding=sharding)

    return jax.jit(jax.value_and_grad(loss, (0, 1))), [*map(shaped, shapes)]


def largest_logits(chunk_tokens):
    """Elements of the largest array with a vocabulary dim, in any computation."""
    gradients, arguments = gradients_of(chunk_tokens=chunk_tokens)
    text = str(jax.make_jaxpr(gradients)(*arguments))
    shapes = re.findall(r"f32\[([\d,]+),2048\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_logits_of_one_chunk_exist_at_a_time():
    """Fails if chunking does nothing, or if chunks do not wait for one another."""
    assert largest_logits(0) == 16 * 64
    assert largest_logits(64) == 64
    gradients, arguments = gradients_of(chunk_tokens=64)
    assert gradients.lower(*arguments).as_text().count("optimization_barrier") == 16


def test_devices_cut_their_own_tokens():
    """Fails if a chunk spans devices: each one would then communicate."""

    def num_collectives(chunk_tokens):
        mesh = meshes.make_mesh(schema.Mesh())
        options = {"chunk_tokens": chunk_tokens, "num_batch_shards": 8}
        gradients, arguments = gradients_of(mesh, **options)
        text = gradients.lower(*arguments).compile().as_text()
        names = r"\b(all-\w+|reduce-scatter|collective-permute)(-start)?\("
        return len(re.findall(names, text))

    assert num_collectives(32) == num_collectives(0) > 0
