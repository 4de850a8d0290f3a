"""Decoder and encoder forward passes in float64, from nested dicts of weights."""

import numpy as np

from tests.reference import attention


def decode(params, config, tokens):
    """Logits of a causal model; `config` has the fields of the model section."""
    rows, length = tokens.shape
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    visible = attention.causal(rows, length)
    x = embed(params["embedding"], config, tokens)
    for number in range(config.num_layers):
        block = layer(params["blocks"], number)
        y = normalise(block["attention_norm"], config, x)
        x = x + attend(block["attention"], config, y, positions, visible)
        y = normalise(block["mlp_norm"], config, x)
        x = x + feed_forward(block["mlp"], config, y)
    x = normalise(params["head"]["norm"], config, x)
    head = params["head"].get("kernel", params["embedding"]["tokens"])
    return x @ np.float64(head).T


def encode(params, config, tokens, lengths):
    """Masked-token logits of a post-norm model."""
    rows, length = tokens.shape
    visible = np.arange(length) < lengths[:, None, None]
    visible = np.broadcast_to(visible, (rows, length, length))
    x = embed(params["embedding"], config, tokens)
    x = normalise(params["embedding"]["norm"], config, x)
    for number in range(config.num_layers):
        block = layer(params["blocks"], number)
        x = x + attend(block["attention"], config, x, None, visible)
        x = normalise(block["attention_norm"], config, x)
        x = x + feed_forward(block["mlp"], config, x)
        x = normalise(block["mlp_norm"], config, x)
    head = params["head"]
    x = normalise(head["norm"], config, gelu(linear(head["transform"], x)))
    return x @ np.float64(params["embedding"]["tokens"]).T + head["bias"]


def layer(stacked, number):
    if isinstance(stacked, dict):
        return {name: layer(branch, number) for name, branch in stacked.items()}
    return stacked[number]


def embed(params, config, tokens):
    x = np.float64(params["tokens"])[tokens]
    if config.positions.kind == "learned":
        x = x + np.float64(params["positions"])[: tokens.shape[1]]
    return x


def normalise(params, config, x):
    if config.norm == "rms_norm":
        return attention.rms_norm(x, params["scale"], config.norm_eps)
    return attention.layer_norm(x, params["scale"], params["bias"], config.norm_eps)


def attend(params, config, x, positions, visible):
    q, k, v = (linear(params[name], x) for name in ("query", "key", "value"))
    if config.query_key_norm:
        q = normalise(params["query_norm"], config, q)
        k = normalise(params["key_norm"], config, k)
    if config.positions.kind == "rotary":
        q, k = (attention.rotate(a, positions, config.rotary.theta) for a in (q, k))
    averages = attention.attend(q, k, v, visible)
    out = np.einsum("blhd,hdm->blm", averages, np.float64(params["out"]["kernel"]))
    return out + params["out"].get("bias", 0)


def feed_forward(params, config, x):
    up = linear(params["up"], x)
    if config.activation == "gelu":
        return linear(params["down"], gelu(up))
    gate = linear(params["gate"], x)
    return linear(params["down"], gate / (1 + np.exp(-gate)) * up)


def linear(params, x):
    return np.tensordot(x, np.float64(params["kernel"]), 1) + params.get("bias", 0)


def gelu(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
