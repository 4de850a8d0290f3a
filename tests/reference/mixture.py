"""A layer of experts as a loop over tokens, in float64, from dicts of weights."""

import math

import numpy as np

from tests.reference import moe, transformer
from zjax.settings import schema


def mixture(params, config, x):
    """Outputs, and the weighted losses of the router, in evaluation."""
    settings, tokens = config.moe, x.reshape(-1, x.shape[-1])
    logits = tokens @ np.float64(params["router"]["kernel"])
    experts, weights = route(settings, logits)
    out = np.zeros_like(tokens)
    for token in range(len(tokens)):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            own = expert_of(params["experts"], expert)
            out[token] += weight * feed_forward(own, config, tokens[token])
    out = out.reshape(x.shape)
    if settings.residual:
        mix = moe.softmax(transformer.linear(params["coefficient"], x))
        mlp = transformer.feed_forward(params["residual"], config, x)
        out = mix[..., :1] * out + mix[..., 1:] * mlp
    if settings.num_shared:
        shared = transformer.feed_forward(params["shared"], config, x)
        gate = 1.0
        if settings.shared_gate:
            gate = 1 / (1 + np.exp(-transformer.linear(params["shared_gate"], x)))
        out = out + gate * shared
    return out, losses(settings, logits, experts, len(x))


def route(settings, logits):
    factor = settings.eval_capacity_factor
    if isinstance(settings, schema.ExpertChoice):
        capacity = math.ceil(factor * len(logits) / settings.num_experts)
        weights = moe.choose_tokens(logits, max(capacity, settings.min_capacity))
        return np.broadcast_to(np.arange(settings.num_experts), logits.shape), weights
    return moe.route(logits, settings.top_k, settings.drop, factor)[:2]


def losses(settings, logits, experts, rows):
    z_loss = settings.z_loss * np.mean(np.log(np.exp(logits).sum(1)) ** 2)
    if isinstance(settings, schema.ExpertChoice):
        return z_loss
    # Of two choices the first one counts, as in GShard.
    counted = experts[:, :1] if settings.top_k == 2 else experts
    parts = rows if settings.balance_scope == "sequence" else 1
    pairs = zip(np.split(logits, parts), np.split(counted, parts), strict=True)
    balance = np.mean([moe.balance_loss(*pair) for pair in pairs])
    return settings.balance_loss * balance + z_loss


def expert_of(params, number):
    return {
        name: {leaf: np.float64(x[number]) for leaf, x in matrix.items()}
        for name, matrix in params.items()
    }


def feed_forward(params, config, token):
    hidden = np.tensordot(token, params["up"]["kernel"], 1)
    hidden = hidden + params["up"].get("bias", 0)
    if config.activation == "swiglu":
        gate, up = hidden
        return transformer.linear(params["down"], gate / (1 + np.exp(-gate)) * up)
    return transformer.linear(params["down"], transformer.gelu(hidden))


def loss(params, config, batch):
    """The loss of a decoder whose blocks may have experts, in evaluation."""
    tokens, targets = np.asarray(batch["tokens"]), np.asarray(batch["targets"])
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    visible = transformer.attention.causal(*tokens.shape)
    x, auxiliary = transformer.embed(params["embedding"], config, tokens), 0.0
    for block in layers_of(params["blocks"]):
        y = transformer.normalise(block["attention_norm"], config, x)
        x = x + transformer.attend(block["attention"], config, y, positions, visible)
        y = transformer.normalise(block["mlp_norm"], config, x)
        if "router" in block["mlp"]:
            y, added = mixture(block["mlp"], config, y)
            auxiliary += added
        else:
            y = transformer.feed_forward(block["mlp"], config, y)
        x = x + y
    x = transformer.normalise(params["head"]["norm"], config, x)
    head = params["head"].get("kernel", params["embedding"]["tokens"])
    logits = x @ np.float64(head).T
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    each = np.log(np.exp(logits).sum(-1)) - target
    weights = np.asarray(batch["weights"])
    return (weights * each).sum() / weights.sum() + auxiliary


def layers_of(blocks):
    """Single layers in their order, from segments, stacks and groups."""
    if "segment0" in blocks:
        for number in range(len(blocks)):
            yield from layers_of(blocks[f"segment{number}"])
        return
    norm = next(iter(blocks.values())) if "layer0" in blocks else blocks
    for number in range(len(norm["mlp_norm"]["scale"])):
        block = transformer.layer(blocks, number)
        grouped = [block[f"layer{i}"] for i in range(len(block)) if "layer0" in block]
        yield from grouped or [block]
