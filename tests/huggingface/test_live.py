"""What goes out computes the same in transformers itself, if it is there.

Run:    pytest -m transformers tests/huggingface
Needs:  pip install torch transformers
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import huggingface as golden
from zjax.checkpoint.store import Store
from zjax.huggingface import export
from zjax.models.generate import generate
from zjax.saving import save

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_an_export_loads_and_computes_the_same(family, tmp_path):
    """Fails if the config.json says something else than the settings."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    run = golden.start(golden.make_config(family))
    save(tmp_path / "run", run.state, run)
    folder = tmp_path / "out"
    export.export_huggingface(Store(str(tmp_path / "run")), str(folder))
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
