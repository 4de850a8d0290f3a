"""Texts with weights and keys in few bits: bytes, values, neighbours, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import language
from tests.support.refusals import config_error
from zjax.generation.dtypes import Dtypes, dtype_problems
from zjax.generation.generator import Generator
from zjax.generation.passes import Reader
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.models import lora
from zjax.models.continuation import params_of
from zjax.models.layers import Linear
from zjax.ops import narrow
from zjax.settings import schema

pytestmark = pytest.mark.usefixtures("unfiltered")

BIASED = dataclasses.replace(language.LLAMA, use_bias=True)
GROUPED = dataclasses.replace(
    language.LLAMA, positions=schema.Rotary(unrotated_every=2)
)
FORMS = {
    "llama": language.LLAMA,
    "gpt": language.GPT,
    "latents": language.LATENT,
    "norms of heads": language.QWEN3,
    "biases beside gates": BIASED,
    "blocks of two layers": GROUPED,
}
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 29, size=n).tolist() for n in (5, 9, 1)]
SAMPLING = Sampling(max_new_tokens=5, num_logprobs=0)


@functools.cache
def model(form="llama"):
    return language.make_language_model(FORMS[form])


def dequantised(form, kind):
    """The model with each matrix of a block as codes hold it, matrix by matrix.

    A matrix that latent attention absorbs stays as it is.
    """
    made = language.make_language_model(FORMS[form])
    for path, layer in nnx.iter_modules(made):
        is_matrix = isinstance(layer, Linear) and "blocks" in path
        if not is_matrix or path[-1] == "key_value":
            continue
        kernel = layer.kernel[...]  # of all blocks
        depth = int(np.prod(kernel.shape[1 : 1 + layer.num_inputs]))
        matrices = kernel.reshape(len(kernel), depth, -1)
        layer.kernel[...] = rounded(matrices, kind).reshape(kernel.shape)
    return made


@functools.partial(jax.jit, static_argnums=1)
def rounded(matrices, kind):
    """What codes hold of each matrix [blocks, in, out], in one program."""
    codes = (narrow.quantize(x, kind) for x in matrices)
    return jnp.stack([*map(narrow.dequantize, codes)])


def texts_of(model, prompts=PROMPTS, sampling=SAMPLING, max_rows=1, **dtypes):
    with Generator(model, max_rows=max_rows, **dtypes) as generator:
        return generator.generate(prompts, sampling)


@pytest.mark.parametrize(
    ("form", "kind"), [*((form, "int4") for form in FORMS), ("llama", "int8")]
)
def test_texts_are_those_of_the_dequantised_model(form, kind):
    """Fails if joined matrices of codes compute other than matrices that stand apart.

    Norms, biases, activations and residuals are among what is compared.
    """
    expected = dequantised(form, kind)
    for text in texts_of(model(form), weight_dtype=kind):
        whole, first = [*text.prompt_ids, *text.ids], len(text.prompt_ids)
        # One length, hence one program: no token depends on later ones.
        tokens = jnp.array([[*whole, *[0] * (language.GPT.max_length - len(whole))]])
        logits = np.float64(language.logits_of(expected, {"tokens": tokens})[0])
        logits = logits[first - 1 : len(whole) - 1]
        assert logits.argmax(-1).tolist() == list(text.ids)
        logprobs = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(text.logprobs, logprobs, atol=2e-4)


@functools.cache
def first_logprobs(**dtypes):
    """Log-probabilities of all tokens after a prompt."""
    sampling = Sampling(max_new_tokens=1, num_logprobs=20)
    [text] = texts_of(model(), PROMPTS[1:2], sampling, **dtypes)
    return np.array([text.best[0].get(token, np.nan) for token in range(29)])


@pytest.mark.parametrize(
    ("dtypes", "bound"),
    [
        # Weights have a deviation of 0.3, and matrices 16 to 24 inputs, so that errors
        # average out less than in models of use.
        (dict(weight_dtype="int8"), 0.2),
        (dict(weight_dtype="int4"), 1.5),
        (dict(weight_dtype="float8"), 0.5),
        (dict(cache_dtype="float8"), 0.5),
        (dict(weight_dtype="float8", cache_dtype="float8"), 0.7),
    ],
)
def test_logits_are_close_to_those_of_plain_weights(dtypes, bound):
    plain, found = first_logprobs(), first_logprobs(**dtypes)
    error = np.nanmax(np.abs(found - plain))
    assert bound / 30 < error < bound


@pytest.mark.parametrize(
    "dtypes",
    [
        dict(weight_dtype="int8"),
        dict(weight_dtype="int4"),
        dict(weight_dtype="float8"),
        dict(cache_dtype="float8"),
    ],
)
def test_greedy_texts_do_not_depend_on_neighbours(dtypes):
    with Generator(model(), max_rows=4, **dtypes) as generator:
        alone = [generator.generate([x], SAMPLING)[0].ids for x in PROMPTS]
        together = generator.generate(PROMPTS, SAMPLING)
    assert [x.ids for x in together] == alone


def block_bytes(dtypes):
    """Bytes on the devices of the matrices of blocks, two codes of 4 bits in one."""
    weights = CutDecoder(wide_model(), Dtypes(*dtypes))._weights
    leaves = jax.tree.leaves(weights.blocks)
    bits = {"int4": 4}
    return sum(
        x.size * bits.get(x.dtype.name, 8 * x.dtype.itemsize) // 8 for x in leaves
    )


@functools.cache
def wide_model():
    """A model in bfloat16 whose matrices have many inputs."""
    config = dataclasses.replace(
        language.LLAMA, num_layers=1, embed_size=256, mlp_size=512
    )
    made = language.make_language_model(config)
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))


@pytest.mark.parametrize(
    ("kind", "share"), [("int8", 1 / 2), ("int4", 1 / 4), ("float8", 1 / 2)]
)
def test_weights_take_a_half_or_a_quarter(kind, share):
    """Fails if a matrix stays as it is, or beside its codes."""
    plain, found = block_bytes(("compute",)), block_bytes((kind,))
    assert share < found / plain < share + 0.02


@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_a_block_of_a_llama_is_four_products_of_codes(kind, monkeypatch):
    """Fails if matrices of codes stand apart, or norms and residuals are left over."""
    found, real = [], narrow.few_rows_matmul

    def watched(x, weights, **settings):
        fused = {"norm", "activation", "residual"}
        given = {name for name in fused if settings.get(name) not in (None, "")}
        found.append((weights.shape, weights.dtype.name.split("_")[0], given))
        return real(x, weights, **settings)

    monkeypatch.setattr(narrow, "few_rows_matmul", watched)
    reader = Reader.of(wide_model(), Dtypes(kind))
    weights = jax.eval_shape(reader.cut, params_of(wide_model()))
    jax.eval_shape(lambda w: reader.empty_caches(w, 2, 4), weights)
    assert found == [
        ((512, 256), kind, {"norm"}),
        ((256, 256), kind, {"residual"}),
        ((1024, 256), kind, {"norm", "activation"}),
        ((256, 512), kind, {"residual"}),
    ]


def test_keys_and_values_take_a_half():
    plain, found = (
        CutDecoder(wide_model(), Dtypes(cache=cache)).page_bytes(64)
        for cache in ("compute", "float8")
    )
    assert found == plain // 2


def test_what_is_stored_narrow_is_told(caplog):
    """Fails if the choice of products, or the range of keys, is silent."""
    with caplog.at_level("INFO", "absl"):
        CutDecoder(wide_model(), Dtypes("int4", "float8"))
        CutDecoder(wide_model(), Dtypes("float8"))
    assert [x for x in caplog.messages if "emulated" not in x] == [
        "weights of blocks in int4 take 0.00 GB: passes of up to 256 tokens multiply "
        "codes, others 16-bit numbers",
        "keys and values in float8: magnitudes beyond 448 become 448",
        "weights of blocks in float8 take 0.00 GB: products of all passes are in "
        "float8",
    ]


def test_unknown_dtypes_are_refused():
    problems = dtype_problems(model(), Dtypes("int3", "int8"))
    assert [*map(str, problems)] == [
        "weight_dtype='int3' is none of compute, int8, int4, float8; use 'compute'",
        "cache_dtype='int8' is none of compute, float8; use 'compute'",
    ]


def with_adapters():
    made = language.make_language_model(language.LLAMA)
    lora.attach(made, jax.random.key(0), settings=schema.Lora(rank=2))
    return made


MIXTURE = dataclasses.replace(
    language.LLAMA, moe=schema.TokenChoice(num_experts=2, top_k=1)
)
TILES = dataclasses.replace(language.LLAMA, mlp_tiles=2)
REFUSED = {
    "experts": (
        lambda: language.make_language_model(MIXTURE),
        "stores no codes of experts; use 'compute'",
    ),
    "tiles": (
        lambda: language.make_language_model(TILES),
        "stores no codes of tiles of feed-forwards; use 'compute'",
    ),
    "adapters": (
        with_adapters,
        "stores no codes of matrices with adapters; merge them by zjax export, or use "
        "'compute'",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_models_without_codes_are_refused(make, message):
    made = make()
    with config_error(f"weight_dtype='int8' {message}"):
        Generator(made, weight_dtype="int8")
    assert not [*dtype_problems(made, Dtypes(cache="float8"))]


def test_roundings_that_training_lacks_are_refused():
    decoder = language.make_language_model(language.LLAMA, batch_invariant=True)
    why = "rounds what training does not, and the model is batch-invariant"
    assert [*map(str, dtype_problems(decoder, Dtypes("int8", "float8")))] == [
        f"weight_dtype='int8' {why}; use 'compute'",
        f"cache_dtype='float8' {why}; use 'compute'",
    ]


def test_matrices_that_devices_split_are_refused():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=auto)
    with jax.set_mesh(mesh):
        [problem] = dtype_problems(model(), Dtypes("int4"))
    assert str(problem) == (
        "weight_dtype='int4' stores no codes of matrices that the tensor axis splits; "
        "set mesh.tensor=1, or use 'compute'"
    )


def test_models_that_store_no_cut_blocks_are_refused():
    problems = dtype_problems(object(), Dtypes("int8", "float8"))
    problem = "goes with the built-in decoder, stored on the devices; use 'compute'"
    assert [*map(str, problems)] == [
        f"weight_dtype='int8' {problem}",
        f"cache_dtype='float8' {problem}",
    ]


def test_devices_without_float8_are_refused(monkeypatch):
    class Client:
        platform_version = "cuda 12"

    class Device:
        platform, client, compute_capability = "gpu", Client, "8.0"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    [problem] = dtype_problems(model(), Dtypes("float8"))
    assert str(problem) == (
        "weight_dtype='float8' needs compute capability 8.9 and this GPU has 8.0; use "
        "'compute'"
    )
