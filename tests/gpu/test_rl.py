"""A rollout on the GPU has the log-probabilities that the trainer finds."""

import numpy as np

from tests.support import rl_run
from tests.support.gpu import NEEDS_HOPPER
from zjax.rl import logprobs_of
from zjax.typing import IGNORED

pytestmark = NEEDS_HOPPER
TEMPERATURE, NUM_PROMPTS = 0.25, 40
SETTINGS = (
    "zero.stage=0",
    "precision.compute_dtype=bfloat16",
    "data.source=synthetic",
    "model.vocab_size=151936",
    "model.num_layers=2",
    "model.embed_size=256",
    "model.mlp_size=512",
    "model.num_kv_heads=1",
    "model.max_length=128",
    f"rl.rollout.temperature={TEMPERATURE}",
    "rl.rollout.num_samples=8",
    "rl.rollout.max_new_tokens=64",
)


def test_sampler_and_trainer_agree(tmp_path, num_prompts=NUM_PROMPTS):
    """Fails if texts of more rows than a pass has, or of a large vocabulary, differ."""
    ids = np.random.default_rng(0).integers(0, 150_000, (num_prompts, 60))
    prompts = [{"prompt": " ".join(map(str, row)), "letter": "7"} for row in ids]
    wanted = f"rl.rollout.num_prompts={num_prompts}"
    trainer = rl_run.make_trainer(
        tmp_path, *SETTINGS, wanted, num_devices=1, prompts=prompts
    )
    batch = next(trainer.loader)
    found = logprobs_of(trainer.run, trainer.state, batch, temperature=TEMPERATURE)
    mask = np.asarray(batch["targets"]) != IGNORED
    drawn = np.asarray(batch["rl"]["logprobs"])[mask]
    assert len(drawn) > 60 * num_prompts * 8
    np.testing.assert_allclose(np.asarray(found)[mask], drawn, atol=0.1)
    trainer.close()
