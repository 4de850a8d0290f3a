"""Cross-entropy with z-loss, token by token in float64."""

import numpy as np


def token_loss(hidden, head, bias, targets, weights, z_loss):
    loss_sum = correct_sum = 0.0
    for where in np.ndindex(targets.shape):
        scores = head.astype(np.float64) @ hidden[where].astype(np.float64) + bias
        log_partition = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        loss = log_partition - scores[targets[where]] + z_loss * log_partition**2
        loss_sum += weights[where] * loss
        correct_sum += weights[where] * (scores.argmax() == targets[where])
    return loss_sum, weights.sum(), correct_sum
