"""Rollouts of unequal lengths, and a plain oracle of a policy's loss and gradient."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from zjax.models.build import make_model

VOCAB, LENGTH = 41, 16
SHAPES = ((3, 5), (2, 9), (1, 4), (4, 12), (2, 1), (6, 7), (3, 3), (5, 2), (2, 8))
"""Tokens of prompt and completion of each rollout."""
MODEL = {
    "num_layers": 1,
    "embed_size": 16,
    "mlp_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": VOCAB,
    "max_length": LENGTH,
    "norm": "rms_norm",
    "positions": "rotary",
    "activation": "swiglu",
    "use_bias": False,
    "tied_head": False,
    "remat": "none",
    "loss_chunk_tokens": 16,
}
TEMPERATURE = 0.8


def make_rollouts(seed=0, shapes=SHAPES):
    """Random texts, with log-probabilities that another sampler could have."""
    rng = np.random.default_rng(seed)

    def one(num_prompt, num_tokens):
        return types.SimpleNamespace(
            prompt_ids=rng.integers(1, VOCAB, num_prompt).tolist(),
            ids=rng.integers(1, VOCAB, num_tokens).astype(np.int32),
            logprobs=values(rng, num_tokens),
            experts=None,
        )

    return [one(*shape) for shape in shapes]


def values(rng, num_tokens):
    """Log-probabilities near those of a model that knows nothing."""
    return (-np.log(VOCAB) + 0.3 * rng.normal(size=num_tokens)).astype(np.float32)


def make_values(seed, shapes=SHAPES):
    """Log-probabilities of each token of each rollout."""
    rng = np.random.default_rng(seed)
    return [values(rng, num_tokens) for _, num_tokens in shapes]


def padded(rollouts):
    """Prompts and completions, each as a row of its own, int32[N, LENGTH]."""
    tokens = np.zeros((len(rollouts), LENGTH), np.int32)
    for row, x in zip(tokens, rollouts, strict=True):
        row[: len(x.prompt_ids) + len(x.ids)] = [*x.prompt_ids, *x.ids]
    return tokens


def oracle(config, params, rollouts, token_loss, weight_of):
    """Loss and gradient of texts, each as a row of its own.

    `token_loss(i, logprobs, entropies)` gives the losses [n] of rollout i, and
    `weight_of(n)` what a token adds to the sum.
    """
    model = make_model(config)
    lengths = [(len(x.prompt_ids), len(x.ids)) for x in rollouts]

    def loss(params):
        logits = model.bind(params, {})(jnp.asarray(padded(rollouts))) / TEMPERATURE
        logprobs = jax.nn.log_softmax(logits)
        total = 0.0
        for i, (m, n) in enumerate(lengths):
            rows = logprobs[i, m - 1 : m + n - 1]
            chosen = rows[np.arange(n), rollouts[i].ids]
            entropies = -(jnp.exp(rows) * rows).sum(-1)
            total += (weight_of(n) * token_loss(i, chosen, entropies)).sum()
        return total

    return jax.jit(jax.value_and_grad(loss))(params)
