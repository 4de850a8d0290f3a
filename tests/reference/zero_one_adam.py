"""0/1 Adam with explicit workers, on flat vectors in NumPy (S15 of the notes)."""

import numpy as np

from tests.reference.compression import Workers


def schedule(num_steps, kappa, var_freeze_step, local_step_scaler, clipper):
    """What each step sends, with the counters of the reference implementation."""
    var_interval, var_counter, local_interval, local_counter = 1, 0, 1, 0
    frozen, kinds = False, []
    for t in range(1, num_steps + 1):
        if not frozen:
            if t % var_interval == 0:
                kinds.append("variance")
                var_counter += 1
                if var_counter == kappa:
                    var_counter, var_interval = 0, 2 * var_interval
            else:
                kinds.append("one_bit")
        else:
            kinds.append("local" if t % local_interval else "merged")
            local_counter += 1
            if local_counter == local_step_scaler:
                local_counter, local_interval = 0, min(clipper, 2 * local_interval)
        frozen = frozen or t > var_freeze_step
    return kinds


class ZeroOneAdam:
    """Workers with parameters float32[N, n]; `size` is n with padding.

    `arrays` are the indices of each array, in the order of messages after local steps.
    """

    def __init__(
        self, params, decayed, kinds, *, num_workers, size, arrays, decay, clip
    ):
        self.order = np.concatenate(arrays)
        self.original = np.argsort(self.order)
        self.params = np.tile(np.float32(params), (num_workers, 1))
        self.anchor, self.decayed = np.float32(params), np.float32(decayed)
        self.momentum = np.zeros_like(self.params)
        self.second = np.zeros_like(self.anchor)
        self.moved = np.zeros_like(self.params)
        self.kinds, self.size, self.number, self.variances = kinds, size, 0, 0
        self.workers = Workers("onebit", num_workers, size, block=4096)
        self.rate_sum, self.decay, self.clip = np.float32(0), decay, clip

    def clipped(self, grads):
        norms = np.linalg.norm(grads, axis=-1, keepdims=True)
        return grads * np.minimum(1, self.clip / norms)

    def sizes(self, b1, b2, eps):
        """What divides momenta, which make a step of 1 at most with these decays."""
        corrected = self.second / (1 - b2**self.variances)
        return (1 - b1**self.number) * (np.sqrt(corrected) + eps)

    def mean(self, vectors):
        sent = np.zeros((len(vectors), self.size), np.float32)
        sent[:, : vectors.shape[1]] = vectors
        return self.workers.mean(sent)[: vectors.shape[1]]

    def step(self, grads, rate, b1=0.9, b2=0.95, eps=1e-8):
        """Takes a step with the gradients float32[N, n] of the workers."""
        kind = self.kinds[self.number]
        self.number += 1
        if kind in ("variance", "one_bit"):
            self.step_together(kind, grads, rate, b1, b2, eps)
            if self.kinds[self.number : self.number + 1] in (["local"], ["merged"]):
                self.workers.worker_errors[:] = 0
                self.workers.server_errors[:] = 0
            return
        grads = self.clipped(grads)
        self.momentum = b1 * self.momentum + (1 - b1) * grads
        sizes = self.sizes(b1, b2, eps)
        update = rate * np.clip(self.momentum / sizes, -1, 1)
        self.params = np.float32(self.params - update)
        self.moved, self.rate_sum = self.moved + update, self.rate_sum + rate
        if kind == "merged":
            mean = self.mean(self.moved[:, self.order])[self.original]
            self.momentum[:] = mean / self.rate_sum * sizes
            decayed = self.rate_sum * self.decay * self.decayed * self.anchor
            self.anchor = np.float32(self.anchor - mean - decayed)
            self.params[:] = self.anchor
            self.moved, self.rate_sum = 0 * self.moved, np.float32(0)

    def step_together(self, kind, grads, rate, b1, b2, eps):
        if kind == "variance":
            mean = self.clipped(grads.mean(axis=0))
            self.second = b2 * self.second + (1 - b2) * mean**2
            self.variances += 1
            self.momentum = b1 * self.momentum + (1 - b1) * mean
            update = self.momentum[0] / self.sizes(b1, b2, eps)
        else:
            norm = np.sqrt((np.linalg.norm(grads, axis=1) ** 2).mean())
            grads = grads * min(1, self.clip / norm)
            momentum = b1 * self.momentum + (1 - b1) * grads
            sizes = self.sizes(b1, b2, eps)
            update = self.mean(np.clip(momentum / sizes, -1, 1))
            self.momentum[:] = update * sizes
        update = update + self.decay * self.decayed * self.anchor
        self.anchor = np.float32(self.anchor - rate * update)
        self.params[:] = self.anchor
