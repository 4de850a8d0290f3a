"""Small language models with weights large enough to matter, and batches for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zjax.models.stack import Decoder, Encoder, hidden_states
from zjax.settings import schema

ROWS, LENGTH = 2, 8
GPT = schema.Model(
    num_layers=2,
    embed_size=16,
    mlp_size=24,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=29,
    max_length=16,
)
LLAMA = dataclasses.replace(
    GPT,
    num_kv_heads=2,
    norm="rms_norm",
    positions=schema.Rotary(),
    activation="swiglu",
    use_bias=False,
    tied_head=False,
)
LATENT = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    positions=schema.Rotary(
        size=2,
        pairs="adjacent",
        scaling=schema.Yarn(
            factor=4.0, original_length=8, mscale=0.7, mscale_all_dim=1.3
        ),
    ),
    latent=schema.Latent(key_rank=6, query_rank=5, plain_size=3, value_size=4),
)
QWEN3 = dataclasses.replace(LLAMA, head_size=14, query_key_norm=True)
BERT = dataclasses.replace(GPT, kind="encoder", norm_eps=1e-12)


def make_language_model(config, **options):
    """Weights of deviation 0.3, so that every layer and bias changes the outcome."""
    kind = {"decoder": Decoder, "encoder": Encoder}[config.kind]
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(model)
    rng = np.random.default_rng(1)

    def fill(path, leaf):
        mean = "scale" in jax.tree_util.keystr(path)
        x = mean + 0.3 * rng.normal(size=leaf.shape)
        return jnp.asarray(x.astype(np.float32))  # compiles nothing

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, state))


def sums_of(model, batch, key=None):
    """Sums of loss, weight and hits, by the head alone."""
    table = model.embedding.tokens[...] if model.config.tied_head else None
    return model.head.loss(hidden_states(model, batch, key), table, batch)


def loss_of(model, batch, key=None):
    """The same, compiled."""
    graph, state = nnx.split(model)
    return _loss(state, batch, key, graph)


def logits_of(model, batch):
    """The scores of a model, compiled."""
    graph, state = nnx.split(model)
    return _logits(state, batch, graph)


def likely_texts(model, requests, length):
    """Takes the most likely token after each prefix, by the model without a cache.

    `requests` are pairs of a prompt and a number of new tokens. One program reads all
    prefixes, padded to one length: no token depends on later ones.
    """
    texts = []
    for prompt, num_new in requests:
        row = np.zeros((1, length), np.int32)
        row[0, : len(prompt)] = prompt
        for place in range(len(prompt), len(prompt) + num_new):
            scores = np.asarray(logits_of(model, {"tokens": row}))[0, place - 1]
            row[0, place] = np.argmax(scores)
        texts.append(row[0, len(prompt) : len(prompt) + num_new].tolist())
    return texts


def likely_tokens(model, prompt, text, length):
    """Takes the most likely token in place of each of a text, after those before it."""
    whole = [*prompt, *text]
    row = np.array([whole + [0] * (length - len(whole))], np.int32)
    scores = np.asarray(logits_of(model, {"tokens": row}))[0]
    return np.argmax(scores[len(prompt) - 1 : len(whole) - 1], -1).tolist()


@functools.partial(jax.jit, static_argnums=3)
def _loss(state, batch, key, graph):
    return sums_of(nnx.merge(graph, state), batch, key)


@functools.partial(jax.jit, static_argnums=2)
def _logits(state, batch, graph):
    model = nnx.merge(graph, state)
    if isinstance(model, Encoder):
        return model.logits(batch)
    return model(batch["tokens"])


def params_of(model):
    """Nested dicts in the paths of the adapter."""
    tree = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        node[path[-1]] = variable[...]
    return tree


def make_text(config, rows=ROWS, length=LENGTH):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, size=(rows, length + 1))
    weights = rng.choice([0.0, 0.5, 1.0], size=(rows, length))
    return {
        "tokens": jnp.array(tokens[:, :-1], jnp.int32),
        "targets": jnp.array(tokens[:, 1:], jnp.int32),
        "weights": jnp.array(weights, jnp.float32),
    }
