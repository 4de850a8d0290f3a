"""One tensor under each update rule, in float64, a line per line of the papers."""

import numpy as np


def adam(p, grads, lrs, *, b1, b2, eps, decay, decoupled):
    """Adam and AdamW: arXiv:1412.6980, arXiv:1711.05101."""
    m = v = np.zeros_like(p)
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        if not decoupled:
            g = g + decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        denominator = np.sqrt(v) / np.sqrt(1 - b2**t) + eps
        step = lr / (1 - b1**t) * m / denominator
        if decoupled:
            p = p - lr * decay * p
        p = p - step
    return p


def lamb(p, grads, lrs, *, b1, b2, eps, decay):
    """LAMB, arXiv:1904.00962, ratio limited to 0.01 ... 10."""
    m = v = np.zeros_like(p)
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p
        p_norm, u_norm = np.sqrt(np.sum(p * p)), np.sqrt(np.sum(u * u))
        ratio = 1.0
        if p_norm > 0 and u_norm > 0:
            ratio = min(max(p_norm / u_norm, 0.01), 10.0)
        p = p - lr * ratio * u
    return p


def lion(p, grads, lrs, *, b1, b2, decay):
    """Lion, arXiv:2302.06675, algorithm 2."""
    m = np.zeros_like(p)
    for g, lr in zip(grads, lrs, strict=True):
        sign = np.sign(b1 * m + (1 - b1) * g)
        p = p - lr * (sign + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def sgd(p, grads, lrs, *, momentum, decay, decoupled=True):
    """Momentum; a decay that is not decoupled passes through it, as in torch."""
    m = np.zeros_like(p)
    for g, lr in zip(grads, lrs, strict=True):
        decayed = decay * p
        m = momentum * m + g + (0 if decoupled else decayed)
        p = p - lr * (m + (decayed if decoupled else 0))
    return p
