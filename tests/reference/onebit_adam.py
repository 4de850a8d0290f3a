"""1-bit Adam with explicit workers, on flat vectors in NumPy (S14 of the notes)."""

import numpy as np

from tests.reference.compression import Workers


class OnebitAdam:
    """Workers with parameters float32[n]; `size` is n with padding."""

    def __init__(
        self, params, decayed, *, num_workers, size, freeze_step, rate, decay, clip
    ):
        self.params, self.decayed = np.float32(params), np.float32(decayed)
        self.momentum = np.zeros_like(self.params)
        self.second = np.zeros_like(self.params)
        self.workers = Workers("onebit", num_workers, size, block=4096)
        self.size, self.num_workers = size, num_workers
        self.freeze_step, self.number, self.count = freeze_step, 0, 0
        self.rate, self.decay, self.clip = rate, decay, clip

    def step(self, grads, b1=0.9, b2=0.95, eps=1e-8):
        """Takes a step with the gradients float32[N, n] of the workers."""
        self.number += 1
        if self.number <= self.freeze_step:
            self.count += 1
            mean = grads.mean(axis=0)
            mean = mean * min(1, self.clip / np.linalg.norm(mean))
            self.momentum = b1 * self.momentum + (1 - b1) * mean
            self.second = b2 * self.second + (1 - b2) * mean**2
        else:
            norm = np.sqrt((np.linalg.norm(grads, axis=1) ** 2).mean())
            grads = grads * min(1, self.clip / norm)
            momentum = b1 * self.momentum + (1 - b1) * grads
            bound = max(1, (1 - b1) / np.sqrt(1 - b2))
            steps = np.clip(momentum / self.sizes(b1, b2, eps), -bound, bound)
            sent = np.zeros((self.num_workers, self.size), np.float32)
            sent[:, : grads.shape[1]] = np.where(self.second > 0, steps, 0)
            mean = self.workers.mean(sent)[: grads.shape[1]]
            mean = np.where(self.second > 0, mean, 0)
            self.momentum = mean * self.sizes(b1, b2, eps)
        update = self.momentum / self.sizes(b1, b2, eps)
        update += self.decay * self.decayed * self.params
        self.params = np.float32(self.params - self.rate * self.scaled(update))

    def scaled(self, update):
        return update

    def sizes(self, b1, b2, eps):
        first, second = 1 - b1**self.count, 1 - b2**self.count
        return first * (np.sqrt(self.second / second) + eps)
