"""Attention, norms and rotations, query by query in float64."""

import numpy as np


def attend(q, k, v, visible):
    """visible[b, i, j] says whether query i sees key j; q is [B, L, H, D]."""
    averages = np.zeros(q.shape, np.float64)
    group = q.shape[2] // k.shape[2]
    for row, i, head in np.ndindex(q.shape[:3]):
        keys = k[row, :, head // group].astype(np.float64)
        values = v[row, :, head // group].astype(np.float64)
        scores = keys @ q[row, i, head].astype(np.float64) / np.sqrt(q.shape[3])
        seen = visible[row, i]
        likely = np.exp(scores[seen] - scores[seen].max())
        averages[row, i, head] = (likely / likely.sum()) @ values[seen]
    return averages


def attend_with_gradients(q, k, v, visible, d_out):
    """Averages, and gradients of q, k and v; a query that sees no key has only 0."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    q, keys, values, d_out = (
        np.moveaxis(np.float64(x), 2, 1)
        for x in (q, k.repeat(group, 2), v.repeat(group, 2), d_out)
    )
    mask = visible[:, None]
    scores = np.where(mask, q @ keys.swapaxes(2, 3) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    slopes = d_out @ values.swapaxes(2, 3)
    slopes = p * (slopes - (p * slopes).sum(-1, keepdims=True)) * scale
    pairs = slopes.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ d_out

    def of_group(x):
        x = x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
        return np.moveaxis(x, 1, 2)

    averages, d_queries = (np.moveaxis(x, 1, 2) for x in (p @ values, slopes @ keys))
    return averages, (d_queries, *map(of_group, pairs))


def causal(num_rows, length):
    return np.broadcast_to(np.tri(length, dtype=bool), (num_rows, length, length))


def layer_norm(x, scale, bias, eps):
    x = np.asarray(x, np.float64)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return normal * scale + (0 if bias is None else bias)


def rms_norm(x, scale, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotate(x, positions, theta):
    """Rotates the pairs (i, i + D/2) of [B, L, H, D] as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, :, None]
    return np.concatenate([pairs.real, pairs.imag], -1)
