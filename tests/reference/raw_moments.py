"""DeepSpeed's 1-bit optimizers with lossless messages, on one layer in NumPy (S14)."""

import numpy as np


def updates(grads, params, *, freeze_step, rate, decay, trust=False):
    """Returns the parameters after each step with the gradients float64[steps, n]."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    momentum = second = np.zeros_like(params)
    mean_norm, found = 0.0, []
    for number, grad in enumerate(grads, start=1):
        momentum = b1 * momentum + (1 - b1) * grad
        if number <= freeze_step:
            second = b2 * second + (1 - b2) * grad**2
        step = momentum / (np.sqrt(second) + eps) + decay * params
        if trust:
            norm = np.linalg.norm(step)
            if number <= freeze_step:
                mean_norm = 0.9 * mean_norm + 0.1 * norm if mean_norm else norm
            else:
                norm = mean_norm
            step = step * np.clip(np.linalg.norm(params) / norm, 0.01, 10)
        params = params - rate * step
        found.append(params)
    return np.stack(found)
