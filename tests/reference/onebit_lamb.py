"""1-bit LAMB with explicit workers: 1-bit Adam with trust ratios, in NumPy."""

import numpy as np

from tests.reference.onebit_adam import OnebitAdam


class OnebitLamb(OnebitAdam):
    """Workers whose parameters are layers of `sizes` elements."""

    def __init__(self, params, decayed, sizes, **settings):
        super().__init__(params, decayed, **settings)
        self.ends = np.cumsum(sizes)[:-1]
        self.norms = [0.0 for _ in sizes]

    def scaled(self, update):
        layers = zip(
            np.split(self.params, self.ends), np.split(update, self.ends), strict=True
        )
        return np.concatenate([self._ratio(i, *each) for i, each in enumerate(layers)])

    def _ratio(self, i, params, update):
        norm, size = np.linalg.norm(params), self.norms[i]
        if self.number <= self.freeze_step:
            mean, size = size, np.linalg.norm(update)
            self.norms[i] = 0.9 * mean + 0.1 * size if mean else size
        ratio = 1 if 0 in (norm, size) else np.clip(norm / size, 0.01, 10)
        return ratio * update
