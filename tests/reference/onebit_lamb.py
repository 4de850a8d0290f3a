"""1-bit LAMB with explicit workers: 1-bit Adam with trust ratios, in NumPy."""

import numpy as np

from tests.reference.onebit_adam import OnebitAdam


class OnebitLamb(OnebitAdam):
    """Workers whose parameters are layers of `sizes` elements."""

    def __init__(self, params, decayed, sizes, **settings):
        super().__init__(params, decayed, **settings)
        self.ends = np.cumsum(sizes)[:-1]
        self.ratios = []

    def scaled(self, update):
        layers = zip(
            np.split(self.params, self.ends), np.split(update, self.ends), strict=True
        )
        parts = [self._ratio(p, u) * u for p, u in layers]
        return np.concatenate(parts)

    def _ratio(self, params, update):
        norms = np.linalg.norm(params), np.linalg.norm(update)
        ratio = 1 if 0 in norms else np.clip(norms[0] / norms[1], 0.01, 10)
        self.ratios.append(ratio)
        return ratio
