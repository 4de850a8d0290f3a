"""1-bit LAMB with explicit workers, layer by layer in NumPy (S16 of the notes)."""

import numpy as np

from tests.reference.compression import Workers


class OnebitLamb:
    """Workers with the layers `params`, float32 arrays that are sent in this order."""

    def __init__(
        self, params, decays, *, num_workers, size, freeze_step, rate, b2=0.95
    ):
        self.params, self.decays = [np.float32(p) for p in params], decays
        self.momentum = [np.zeros_like(p) for p in self.params]
        self.second = [np.zeros_like(p) for p in self.params]
        self.fresh = [np.zeros_like(p) for p in self.params]
        self.ratio = [np.float32(0) for _ in params]
        self.factor = [np.float32(1) for _ in params]
        self.workers = Workers("onebit", num_workers, size, block=4096)
        self.size, self.num_workers, self.b2 = size, num_workers, b2
        self.freeze_step, self.number, self.rate = freeze_step, 0, rate

    def step(self, grads, b1=0.9, eps=1e-8):
        """Takes a step with gradients [N, ...] of each layer, one per worker."""
        self.number += 1
        if self.number <= self.freeze_step:
            for i, grad in enumerate(grads):
                self._warm_up(i, grad.mean(axis=0), b1, eps)
            if self.number == self.freeze_step:
                self.fresh = [v.copy() for v in self.second]
                sizes = [np.sqrt((m**2).mean()) for m in self.momentum]
                self.scaling = [np.float32(np.mean(sizes) / size) for size in sizes]
            return
        sent = np.zeros((self.num_workers, self.size), np.float32)
        start, ends = 0, []
        for m, g, s in zip(self.momentum, grads, self.scaling, strict=True):
            part = (b1 * m + (1 - b1) * g) * s
            sent[:, start : start + m.size] = part.reshape(self.num_workers, -1)
            start += m.size
            ends.append(start)
        mean = np.split(self.workers.mean(sent), ends)
        for i, part in enumerate(mean[:-1]):
            self._compressed(i, part.reshape(self.params[i].shape), b1, eps)

    def _warm_up(self, i, grad, b1, eps):
        self.momentum[i] = b1 * self.momentum[i] + (1 - b1) * grad
        self.second[i] = self.b2 * self.second[i] + (1 - self.b2) * grad**2
        update = self.momentum[i] / (np.sqrt(self.second[i]) + eps)
        update += self.decays[i] * self.params[i]
        norms = np.linalg.norm(self.params[i]), np.linalg.norm(update)
        ratio = 1 if 0 in norms else np.clip(norms[0] / norms[1], 0.01, 10)
        if ratio != 1:
            self.ratio[i] = 0.9 * self.ratio[i] + 0.1 * ratio
        self._move(i, ratio * update)

    def _compressed(self, i, mean, b1, eps):
        momentum = mean / self.scaling[i]
        grad = (momentum - b1 * self.momentum[i]) / (1 - b1)
        self.momentum[i] = momentum
        self.fresh[i] = self.b2 * self.fresh[i] + (1 - self.b2) * grad**2
        kept = np.sqrt(self.second[i]) + eps
        scaled = momentum / kept
        update = scaled + self.decays[i] * self.params[i]
        factor = (kept / (np.sqrt(self.fresh[i]) + eps)).max()
        if self.decays[i] > 0:
            share = min(1, np.linalg.norm(scaled) / np.linalg.norm(update))
            factor = factor * share + 1 - share
        factor = np.clip(factor, 0.5, 4)
        factor = np.clip(factor, self.factor[i] * 0.9, self.factor[i] * 1.1)
        self.factor[i] = factor
        self._move(i, self.ratio[i] * factor * update)

    def _move(self, i, update):
        self.params[i] = np.float32(self.params[i] - self.rate * update)
