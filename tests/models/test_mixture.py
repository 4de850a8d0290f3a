"""Experts in the built-in models, against a loop over tokens and published sizes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reference import mixture as reference
from tests.support import language
from zjax.config import load_config
from zjax.errors import ConfigError
from zjax.generation.generate import generate
from zjax.models import flops, mixture
from zjax.models.block import layers_of, segments_of
from zjax.models.build import make_model
from zjax.models.embedding import trained_tokens
from zjax.models.mixture import MixtureOfExperts
from zjax.run.plan_report import report_plan
from zjax.settings import schema
from zjax.settings.mixture import describe_future
from zjax.sharding.mesh import make_mesh

PLAIN = schema.TokenChoice(num_experts=4, top_k=2, balance_loss=0.1, z_loss=0.03)
LAYERS = {
    "top-2": (language.GPT, PLAIN),
    "residual-drops": (
        language.GPT,
        dataclasses.replace(PLAIN, top_k=1, residual=True, drop="position"),
    ),
    "expert-choice": (
        language.GPT,
        schema.ExpertChoice(
            num_experts=4,
            eval_capacity_factor=0.75,
            min_capacity=1,
            z_loss=0.03,
        ),
    ),
    "shared-swiglu": (
        language.LLAMA,
        dataclasses.replace(
            PLAIN,
            top_k=3,
            num_shared=2,
            shared_gate=True,
            expert_size=6,
            balance_scope="sequence",
        ),
    ),
}
FOUR = {
    "every-second": dataclasses.replace(
        language.GPT, num_layers=4, moe=dataclasses.replace(PLAIN, every=2)
    ),
    "pyramid-behind-a-dense-one": dataclasses.replace(
        language.LLAMA,
        num_layers=4,
        moe=dataclasses.replace(
            PLAIN, num_experts=(2, 2, 3), first_dense=1, residual=True
        ),
    ),
}


def make_layer(config, moe):
    """With weights large enough to matter."""
    config = dataclasses.replace(config, moe=moe)
    layer = MixtureOfExperts(
        config, config.moe, moe.num_experts, out_std=0.02, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    rng = np.random.default_rng(1)

    def fill(leaf):
        return jnp.array(0.4 * rng.normal(size=leaf.shape), jnp.float32)

    return nnx.merge(graph, jax.tree.map(fill, state)), config


@nnx.jit
def run(layer, *args, **given):
    return layer(*args, **given)


def make_stream(seed=2):
    return jax.random.normal(jax.random.key(seed), (2, 8, language.GPT.embed_size))


@pytest.mark.parametrize(("config", "moe"), LAYERS.values(), ids=LAYERS)
def test_a_layer_is_a_loop_over_tokens(config, moe):
    """Fails if the weight of a choice, a coefficient or a gate is not applied."""
    layer, config = make_layer(config, moe)
    x = make_stream()
    found, auxiliary = run(layer, x)
    params = jax.tree.map(np.asarray, language.params_of(layer))
    expected, loss = reference.mixture(params, config, np.float64(x))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(auxiliary.loss, loss, rtol=1e-5)
    if isinstance(moe, schema.ExpertChoice):
        assert 0.1 < float(auxiliary.metrics["unchosen_fraction"]) < 0.8
        assert auxiliary.totals["load"].tolist() == [3, 3, 3, 3]
        return
    drops = moe.drop != "none"
    assert (float(auxiliary.metrics["dropped_fraction"]) > 0.1) == drops


@pytest.mark.parametrize("config", FOUR.values(), ids=FOUR)
def test_loss_and_gradients_of_four_layers(config):
    """Gradients of every array against differences of a loop in float64."""
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    params = language.params_of(language.make_language_model(config))
    batch = language.make_text(config)

    def loss(params):
        return model.loss(params, {}, batch, None).value

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expect = functools.partial(reference.loss, config=config, batch=batch)
    arrays = jax.tree.map(np.float64, params)
    np.testing.assert_allclose(value, expect(arrays), rtol=1e-5)
    rng, step = np.random.default_rng(3), 1e-5
    for number, grad in enumerate(jax.tree.leaves(grads)):
        leaves, tree = jax.tree.flatten(arrays)
        direction = rng.choice([-1.0, 1.0], size=grad.shape)
        ends = []
        for sign in (step, -step):
            moved = [*leaves]
            moved[number] = leaves[number] + sign * direction
            ends.append(expect(tree.unflatten(moved)))
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(
            np.sum(grad * direction), slope, rtol=2e-3, atol=2e-5
        )


@pytest.mark.parametrize(("coefficient", "branch"), [((40, -40), 0), ((-40, 40), 1)])
def test_forced_coefficients_leave_one_branch(coefficient, branch):
    """(1, 0) is the plain mixture, and (0, 1) the feed-forward."""
    moe = dataclasses.replace(PLAIN, residual=True)
    layer, _ = make_layer(language.GPT, moe)
    layer.coefficient.kernel[...] = jnp.zeros_like(layer.coefficient.kernel[...])
    layer.coefficient.bias[...] = jnp.array(coefficient, jnp.float32)
    x = make_stream()
    found, mlp = run(layer, x)[0], run(layer.residual, x)
    layer.residual = layer.coefficient = None
    expected = (run(layer, x)[0], mlp)[branch]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", [{"bias_rate": 0.1}, {"choice_bias": True}])
def test_a_bias_chooses_experts_and_does_not_weigh_them(setting):
    layer, _ = make_layer(language.GPT, dataclasses.replace(PLAIN, **setting))
    x, found = make_stream(), []
    for bias in (9.0, 18.0):
        layer.router.bias[...] = jnp.array([bias, 0, bias, 0])
        y, auxiliary = run(layer, x)
        assert auxiliary.totals["load"].tolist() == [16, 0, 16, 0]
        found.append(y)
    np.testing.assert_array_equal(*found)


def test_a_bias_stays_where_nothing_moves_it():
    """It is among what loads move, as it is float32 and gets no gradient; by 0."""
    moe = dataclasses.replace(PLAIN, choice_bias=True)
    model = dataclasses.replace(language.GPT, moe=moe)
    (segment,) = make_model(schema.Config(model=model)).stack.segments
    ((path, move),) = segment.moves.items()
    bias = jnp.array([0.1, -0.3, 0.7, 1e-9])
    assert path == "mlp/router/bias"
    moved = move(bias, {"load": jnp.array([9, 1, 0, 2])})
    np.testing.assert_array_equal(moved, bias)


def test_padding_uses_no_capacity():
    """Fails if the router counts tokens that the loss does not."""
    moe = schema.TokenChoice(num_experts=2, drop="position", min_capacity=1)
    layer, _ = make_layer(language.GPT, moe)
    x = make_stream().at[:, 1:].set(make_stream()[:1, :1])
    counts = jnp.zeros(x.shape[:2], bool).at[1].set(True)
    found, auxiliary = run(layer, x, counts)
    assert not np.any(found[0])
    # Eight equal tokens for the eight places of sixteen tokens.
    assert float(auxiliary.metrics["dropped_fraction"]) == 0
    assert float(run(layer, x)[1].metrics["dropped_fraction"]) > 0


def test_devices_count_by_their_tokens():
    """Fails if a device of padding weighs as much as one without."""
    numbers = {
        "num_tokens": jnp.array([1.0, 3.0]),
        "router_z_loss": jnp.array([4.0, 8.0]),
        "balance_loss": jnp.array([2.0, 1.0]),
        "load": jnp.array([[1, 0], [2, 1]]),
    }
    moe = schema.TokenChoice(num_experts=2, z_loss=0.5, balance_loss=0.25)
    found = mixture._auxiliary(numbers, moe)
    assert found.metrics == {"router_z_loss": 7.0, "balance_loss": 1.25}
    assert float(found.loss) == 0.5 * 7.0 + 0.25 * 1.25
    assert found.totals["load"].tolist() == [3, 1]


def test_devices_draw_other_noise():
    """Fails if devices, or parts of a sequence, draw alike: equal tokens would have
    equal experts on all of them."""
    moe = schema.TokenChoice(num_experts=4, sampling="first")
    layer, _ = make_layer(language.GPT, moe)
    mesh = make_mesh(schema.Mesh(data=4, sequence=2))
    tokens = NamedSharding(mesh, P("data", "sequence"))
    x = jax.device_put(jnp.ones((8, 16, language.GPT.embed_size)), tokens)
    with jax.set_mesh(mesh):
        y, _ = run(layer, x, key=jax.random.key(0))
    of_devices = np.asarray(y)[..., 0].reshape(4, 2, 2, 8).swapaxes(1, 2)
    assert len(np.unique(of_devices.reshape(8, 16), axis=0)) == 8


def test_tokens_behind_the_last_target_are_no_load():
    """Fails if rows padded by targets of -100 alone count their padding."""
    config = dataclasses.replace(language.GPT, moe=PLAIN)
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    params = language.params_of(language.make_language_model(config))
    batch = language.make_text(config)
    targets = jnp.asarray(batch["targets"]).at[:, 3:].set(-100).at[:, 0].set(-100)
    evaluate = jax.jit(functools.partial(model.loss, model_state={}, key=None))
    padded = evaluate(params, batch={"tokens": batch["tokens"], "targets": targets})
    named = jnp.full(len(targets), 3, jnp.int32)
    lengths = {"lengths": named, "tokens": batch["tokens"], "targets": targets}
    expected = evaluate(params, batch=lengths)
    (found,), (wanted,) = padded.totals, expected.totals
    assert found["load"].sum(1).tolist() == [2 * 3 * len(targets)] * config.num_layers
    np.testing.assert_array_equal(found["load"], wanted["load"])
    np.testing.assert_allclose(padded.value, expected.value, rtol=1e-6)


def test_tokens_of_an_encoder_count_where_their_row_has_a_target():
    config = schema.Model(kind="encoder", moe=PLAIN)
    targets = jnp.array([[-100, 5, -100], [-100, -100, -100], [1, 1, 1]])
    weights = jnp.array([[1.0] * 3, [1.0] * 3, [0.0] * 3])
    found = trained_tokens({"targets": targets, "weights": weights}, config)
    assert found.tolist() == [[True] * 3, [False] * 3, [False] * 3]


def test_jitter_moves_the_router_alone_and_only_while_training():
    moe = schema.TokenChoice(num_experts=4, jitter=0.5)
    layer, _ = make_layer(language.GPT, moe)
    x, still = make_stream(), run(layer, make_stream())
    shaken = run(layer, x, key=jax.random.key(0))
    name = "router_entropy"
    assert float(shaken[1].metrics[name]) != float(still[1].metrics[name])
    one, _ = make_layer(language.GPT, dataclasses.replace(moe, num_experts=1))
    found = run(one, x)[0], run(one, x, key=jax.random.key(0))[0]
    np.testing.assert_array_equal(*found)


def test_router_is_initialised_as_in_switch():
    """A truncated normal of variance 0.1 / fan-in."""
    config = dataclasses.replace(language.GPT, embed_size=256, moe=PLAIN)
    layer = MixtureOfExperts(config, config.moe, 64, out_std=0.02, rngs=nnx.Rngs(0))
    kernel = layer.router.kernel[...]
    std = (0.1 / 256) ** 0.5
    np.testing.assert_allclose(jnp.std(kernel), std, rtol=0.02)
    assert float(jnp.abs(kernel).max()) < 2.3 * std


def test_generation_continues_as_the_whole_text_would():
    """Fails if a segment is left out, or a cache goes to another layer."""
    config = dataclasses.replace(FOUR["every-second"], layers_per_scan=1)
    model = language.make_language_model(config)
    tokens = language.make_text(config)["tokens"][:, :3]
    text = generate(model, tokens, max_new_tokens=4)
    logits = language.logits_of(model, {"tokens": text})
    np.testing.assert_array_equal(jnp.argmax(logits[:, 2:-1], -1), text[:, 3:])


def test_generation_of_a_row_does_not_depend_on_others():
    """Fails if experts drop tokens of a prompt."""
    moe = dataclasses.replace(PLAIN, top_k=1, drop="position", min_capacity=1)
    config = dataclasses.replace(language.GPT, moe=moe)
    model = language.make_language_model(config)
    tokens = language.make_text(config, rows=4)["tokens"]
    text = generate(model, tokens, max_new_tokens=4)
    alone = generate(model, tokens[:1], max_new_tokens=4)
    np.testing.assert_array_equal(text[:1], alone)


FUTURE = schema.ExpertChoice(num_experts=4)


def test_experts_that_choose_tokens_write_no_text():
    config = dataclasses.replace(language.GPT, moe=FUTURE)
    model = language.make_language_model(config)
    tokens = language.make_text(config)["tokens"][:, :3]
    with pytest.raises(ConfigError) as error:
        generate(model, tokens, max_new_tokens=4)
    assert str(error.value) == (
        "model.moe='expert_choice' chooses tokens by comparison with later ones, "
        "which are not written; generate with a model of moe='token_choice'"
    )


def test_a_decoder_logs_that_its_experts_see_the_future(caplog, tmp_path):
    model = dataclasses.replace(language.GPT, vocab_size=257, moe=FUTURE)
    config = schema.Config(model=model, data=schema.Data(length=8))
    make_model(config)
    (note,) = caplog.messages
    assert note == describe_future(model)
    assert note == (
        "model.moe='expert_choice': tokens compete with later ones of their "
        "sequence.\nLosses of training and evaluation see the future, and no text is "
        "generated."
    )
    picture = str(tmp_path / "plan.png")
    assert note in report_plan(config, num_devices=1, picture=picture)
    assert not describe_future(dataclasses.replace(model, kind="encoder"))


def test_float8_leaves_experts_out(caplog):
    model = dataclasses.replace(language.GPT, moe=PLAIN)
    precision = schema.Precision(matmul_dtype="float8")
    data = schema.Data(length=8)
    make_model(schema.Config(model=model, precision=precision, data=data))
    note = "float8: experts multiply in precision.compute_dtype"
    assert caplog.messages.count(note) == 1


def test_a_loop_over_blocks_changes_no_value():
    apart = FOUR["every-second"]
    params = language.params_of(language.make_language_model(apart))
    batch, key = language.make_text(apart), jax.random.key(1)

    def loss(config):
        model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
        return jax.jit(model.loss)(params, {}, batch, key)

    loop = loss(dataclasses.replace(apart, layers_per_scan=1))
    expected = loss(apart)
    assert loop.metrics.keys() == expected.metrics.keys()
    np.testing.assert_allclose(loop.value, expected.value, rtol=1e-5)
    for name, x in expected.metrics.items():
        np.testing.assert_allclose(loop.metrics[name], x, rtol=1e-4, err_msg=name)


def test_layers_have_the_experts_of_a_pyramid():
    model = language.make_language_model(FOUR["pyramid-behind-a-dense-one"])
    kinds = [
        getattr(getattr(layer.mlp, "settings", None), "num_experts", 0)
        for segment in segments_of(model.blocks).values()
        for layer in layers_of(segment)
    ]
    assert kinds == [0, 2, 3]


@pytest.mark.parametrize(("policy", "passes"), [("elementwise", 1), ("full", 2)])
def test_the_backward_pass_routes_no_token_again(policy, passes):
    """Fails if a policy saves no routing, and sorts all tokens twice."""
    moe = dataclasses.replace(PLAIN, drop="position")
    config = dataclasses.replace(language.GPT, num_layers=1, moe=moe, remat=policy)
    model = make_model(schema.Config(model=config, data=schema.Data(length=8)))
    params = language.params_of(language.make_language_model(config))
    batch = language.make_text(config)

    def loss(params):
        return model.loss(params, {}, batch, None).value

    backward = jax.make_jaxpr(lambda params: jax.vjp(loss, params)[1](1.0))(params)
    text = str(backward)
    assert text.count("= top_k[") == passes
    # One for the capacity of the experts, one for their rows.
    assert text.count("= sort[") == 2 * passes


def gpt(width, num_layers, num_experts, *, residual):
    moe = schema.TokenChoice(num_experts=num_experts, every=2, residual=residual)
    return schema.Model(
        num_layers=num_layers,
        embed_size=width,
        num_heads=16,
        vocab_size=50_257,
        max_length=2_048,
        moe=moe,
    )


def pyramid(*runs):
    return sum(((number,) * layers for layers, number in runs), ())


SMALL, STUDENT = pyramid((10, 32), (2, 64)), pyramid((8, 32), (2, 64))
LARGE, LARGE_STUDENT = pyramid((10, 64), (2, 128)), pyramid((8, 64), (2, 128))
DEEPSPEED = {
    "350M+MoE-128": (gpt(1024, 24, 128, residual=False), "13.15"),
    "1.3B+MoE-128": (gpt(2048, 24, 128, residual=False), "52.47"),
    "350M PR-MoE": (gpt(1024, 24, SMALL, residual=True), "4.117"),
    "1.3B PR-MoE": (gpt(2048, 24, LARGE, residual=True), "31.39"),
    "350M PR-MoE, MoS": (gpt(1024, 21, STUDENT, residual=True), "3.542"),
    "1.3B PR-MoE, MoS": (gpt(2048, 21, LARGE_STUDENT, residual=True), "26.94"),
}


def count(model):
    built = make_model(schema.Config(model=model))
    shapes, _ = jax.eval_shape(built.init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def by_formula(model):
    """A GPT with experts in even layers, counted by hand."""
    h, layers, residual = model.embed_size, model.num_layers, model.moe.residual
    experts = range(2, layers + 1, 2)
    given = model.moe.num_experts
    numbers = given if isinstance(given, tuple) else (given,) * len(experts)
    total = (model.vocab_size + model.max_length + 2) * h + layers * (4 * h**2 + 8 * h)
    total += (layers - len(experts)) * (8 * h**2 + 5 * h)
    for number in numbers:
        total += number * (8 * h**2 + 5 * h) + h * number
        total += residual * (8 * h**2 + 7 * h + 2)
    return total


@pytest.mark.parametrize(("model", "billions"), DEEPSPEED.values(), ids=DEEPSPEED)
def test_deepspeed_moe(model, billions):
    number = count(model)
    assert number == by_formula(model) == flops.num_params(model)
    decimals = len(billions.partition(".")[2])
    assert f"{number / 1e9:.{decimals}f}" == billions


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral_8x7b", "46.70", "12.88"), ("qwen3_moe_30b", "30.53", "3.35")],
)
def test_configs(name, total, active):
    model = load_config(f"configs/{name}.py").model
    number = count(model)
    assert number == flops.num_params(model)
    found = number / 1e9, flops.num_params(model, active=True) / 1e9
    assert tuple(f"{x:.2f}" for x in found) == (total, active)


def test_shared_experts_and_their_gate_count():
    moe = schema.TokenChoice(
        num_experts=4, first_dense=1, num_shared=2, shared_gate=True, expert_size=24
    )
    model = schema.Model(
        num_layers=3, embed_size=16, num_heads=2, vocab_size=61, moe=moe
    )
    assert count(model) == flops.num_params(model)


def test_flops_count_the_experts_of_a_token_alone():
    """Fails if MFU grows with the number of experts."""

    def per_token(num_experts, top_k):
        moe = schema.TokenChoice(num_experts=num_experts, top_k=top_k)
        model = schema.Model(moe=moe)
        return flops.flops_per_token(model, 1024, causal_attention="half")

    dense = flops.flops_per_token(schema.Model(), 1024, causal_attention="half")
    routers = 6 * 12 * 768
    # The losses of the router multiply a few numbers per token.
    assert per_token(8, 1) == pytest.approx(dense + 8 * routers, rel=1e-6)
    assert per_token(64, 1) == pytest.approx(dense + 64 * routers, rel=1e-5)
    mlp = 12 * 2 * 768 * 3072
    assert per_token(8, 2) == pytest.approx(per_token(8, 1) + 6 * mlp, rel=1e-6)
