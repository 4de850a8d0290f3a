"""What goes out computes the same in transformers itself, if it is there.

Run:    pytest -m transformers tests/huggingface
Needs:  pip install torch transformers
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import huggingface as golden
from tests.support import quantized
from zjax.checkpoint.export import export_huggingface, export_peft
from zjax.checkpoint.store import Store
from zjax.config.load import load_config
from zjax.generation.generate import generate
from zjax.huggingface import adapter_settings
from zjax.run.saving import save
from zjax.weights.codes import Fp8, Mxfp4

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_an_export_loads_and_computes_the_same(family, tmp_path):
    """Fails if the config.json says something else than the settings."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    run = golden.start(golden.make_config(family))
    save(tmp_path / "run", run.state, run)
    folder = tmp_path / "out"
    export_huggingface(Store(str(tmp_path / "run")), str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = np.random.default_rng(1).integers(0, 61, (2, 20))
    given = torch.tensor(tokens)
    model, tokens = run.bind(run.state), jnp.asarray(tokens, jnp.int32)
    with torch.no_grad():
        logits = theirs(given).logits
        text = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )
    ours = nnx.jit(lambda model, x: model(x))(model, tokens)
    np.testing.assert_allclose(ours, logits, rtol=2e-5, atol=2e-5)
    written = generate(model, tokens, max_new_tokens=8)
    np.testing.assert_array_equal(written, text)


@pytest.mark.parametrize("family", golden.ENCODERS)
def test_an_exported_encoder_computes_the_same(family, tmp_path):
    """Fails if positions, types or padding mean something else there."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    run = golden.start(golden.make_config(family))
    save(tmp_path / "run", run.state, run)
    folder = tmp_path / "out"
    export_huggingface(Store(str(tmp_path / "run")), str(folder))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected = golden.expected_of(family)
    tokens, types, lengths = (
        expected[name] for name in ("tokens", "token_types", "lengths")
    )
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    given = {
        "input_ids": tokens,
        "token_type_ids": types,
        "attention_mask": is_token.astype(int),
    }
    with torch.no_grad():
        logits = theirs(**{n: torch.tensor(x) for n, x in given.items()}).logits
    batch = {"tokens": tokens, "token_types": types, "lengths": lengths}
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}
    ours = nnx.jit(lambda model, x: model.logits(x))(run.bind(run.state), batch)
    np.testing.assert_allclose(
        ours[is_token], logits.numpy()[is_token], rtol=2e-5, atol=2e-5
    )


def test_adapters_that_came_and_went_compute_the_same_in_peft(tmp_path):
    """Fails if PEFT reads our adapter_config.json or tensors otherwise."""
    names = ("torch", "transformers", "peft")
    torch, transformers, peft = map(pytest.importorskip, names)
    folder = golden.FOLDER.parent / "peft" / "rslora"
    settings = adapter_settings(folder)
    lora = {f"lora.{name}": value for name, value in settings.items()}
    run = golden.start(load_config(golden.make_config("llama"), lora))
    save(tmp_path / "run", run.state, run)
    export_peft(Store(str(tmp_path / "run")), str(tmp_path / "out"))
    base = transformers.AutoModelForCausalLM.from_pretrained(golden.FOLDER / "llama")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with np.load(folder / "expected.npz") as file, torch.no_grad():
        logits = theirs(torch.tensor(file["tokens"])).logits
        np.testing.assert_allclose(logits, file["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_quantised_checkpoints_compute_the_same(method, tmp_path):
    """As in transformers, which dequantises them on a CPU, too.

    It takes blocks that divide the dims alone; `modules_to_not_convert` has the others.
    """
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    folder = tmp_path / "stored"
    if method == "fp8":
        skipped = "lm_head", "kv_a_proj_with_mqa", "kv_b_proj"
        quantized.write_fp8(folder, tmp_path / "plain", block=(2, 2), skipped=skipped)
    else:
        quantized.write_mxfp4(folder, tmp_path / "plain")
    family = {"fp8": "deepseek_v3", "mxfp4": "gpt_oss"}[method]
    run = golden.start(golden.make_config(family, directory=folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    tokens = np.random.default_rng(1).integers(0, 61, (2, 20))
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits
    model = run.bind(run.state)
    ours = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(ours, logits, rtol=2e-5, atol=2e-5)


def test_values_of_codes_are_those_of_transformers():
    """Of all codes and scales but that of NaN, which transformers has as infinite."""
    torch, _ = map(pytest.importorskip, ("torch", "transformers"))
    from transformers.integrations import finegrained_fp8, mxfp4

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(255, 1)
    scales = np.arange(255, dtype=np.uint8)[None, :, None].repeat(16, 2)
    theirs = mxfp4.convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)))
    stored = blocks, scales
    ours = Mxfp4().read(
        tuple(slice(0, n) for n in theirs.shape), *(x.__getitem__ for x in stored)
    )
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float())
    shape = 130, 300
    codes, factors = quantized.random_fp8(shape, (128, 128), np.random.default_rng(0))
    theirs = finegrained_fp8._dequantize_fp8_weight(
        torch.tensor(codes.view(np.uint8)).view(torch.float8_e4m3fn),
        *(torch.tensor(factors), [128, 128], torch.float32),
    )
    ours = Fp8().read(
        tuple(slice(0, n) for n in shape), codes.__getitem__, factors.__getitem__
    )
    np.testing.assert_array_equal(ours, theirs)
