"""Number of programs that share the latents of a row."""

import dataclasses

from zjax_kernels.decode.mosaic_gpu.work import Sizes
from zjax_kernels.decode.tuning import Tuning

H200 = Tuning(stages=2, programs_per_sm=1, min_steps=4)
"""Tuning of all sizes: two stages of 576 channels, and queries, fill shared memory."""


@dataclasses.dataclass(frozen=True)
class LatentSizes(Sizes):
    """Static sizes of a call; any number of programs may share the keys of a tile."""

    @property
    def splits(self) -> int:
        """Number of programs that share the keys of a tile."""
        return self.most_splits
