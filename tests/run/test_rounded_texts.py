"""Texts and exports of a run that learned rounded matrices have its forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zjax
from tests.parity import test_lora as lora
from tests.support.refusals import config_error
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.ops import rounding

RULES = {"rules": [{"weights": "int4"}]}
TOKENS = np.random.default_rng(1).integers(0, 257, (2, 8)).astype(np.int32)


def config_of(directory, **settings):
    return zjax.load_config(
        {
            "directory": str(directory),
            "num_steps": 2,
            "global_batch_size": 8,
            "model": lora.SHAPE | {"vocab_size": 257, "max_length": 16},
            "data": {"length": 8, "source": "synthetic"},
            "quantize": RULES,
            "optimizer": {"peak_learning_rate": 0.1},
            "evaluation": {"every_steps": 0},
        }
        | settings
    )


@pytest.fixture(scope="module", params=["", "lora"])
def trained(request, tmp_path_factory):
    """A trained run, with its state and directory."""
    directory = tmp_path_factory.mktemp("run")
    settings = {"lora": {"rank": 2, "alpha": 32.0}} if request.param else {}
    config = config_of(directory, **settings)
    trainer = zjax.Trainer(config)
    trainer.fit()
    return trainer.run, trainer.state, directory


def logits_of(decoder, tokens):
    return np.float32(jax.jit(lambda tokens: decoder(tokens))(tokens))


def test_texts_are_those_of_the_forward_pass(trained):
    """Fails if matrices are rounded twice, by another grid, or not at all."""
    run, state, _ = trained
    kinds = ["compute"] if run.config.lora else ["compute", "int4"]
    with jax.set_mesh(run.mesh):
        decoder = run.decoder(state)
        logprobs = jax.nn.log_softmax(logits_of(decoder, TOKENS)[:, -1])
    for kind in kinds:
        with Generator(run, state, weight_dtype=kind) as generator:
            sampling = Sampling(max_new_tokens=1, num_logprobs=20)
            texts = generator.generate([row.tolist() for row in TOKENS], sampling)
        for text, expected in zip(texts, logprobs, strict=True):
            for token, value in text.best[0].items():
                np.testing.assert_allclose(value, expected[token], atol=2e-2)


def test_exports_hold_the_rounded_values(trained, tmp_path):
    """Fails if exported matrices are off the grid, or adapters merge elsewhere."""
    run, state, directory = trained
    path = tmp_path / "model.safetensors"
    export_safetensors(Store(str(directory / "checkpoints")), str(path))
    found = safetensors.numpy.load_file(path)
    kernel = found["blocks.mlp.down.kernel"]
    down = state.master["blocks"]["mlp"]["down"]
    raw = np.asarray(down["kernel"])[:, :32, :16]
    for layer in range(2):
        expected = rounding.rounded(jnp.bfloat16(raw[layer]), "int4", 128)
        expected = np.asarray(expected, np.float32)
        if run.config.lora:
            a, b = (np.asarray(down["lora"][name])[layer] for name in "ab")
            expected = expected + 16 * a @ b
        else:
            assert len(np.unique(expected[:, 0])) <= 15
        np.testing.assert_allclose(kernel[layer], expected, rtol=2**-7, atol=1e-5)
        assert np.abs(kernel[layer] - raw[layer]).max() > 1e-3


def test_codes_of_another_size_are_refused(trained):
    """Fails if a text is written with codes that the run did not learn."""
    run, state, _ = trained
    if run.config.lora:
        pytest.skip("adapters are refused first")
    with config_error(
        "weight_dtype='int8' stores no codes of matrices that learned int4 in groups "
        "of 16, not 16; use 'compute'"
    ):
        Generator(run, state, weight_dtype="int8")
