"""Boolean arrays as hashable values, for caches."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bits:
    """A hashable Boolean array.

    Args:
        shape: Shape of the array.
        packed: Values, eight to a byte.

    Example:
        >>> Bits.of(np.eye(3)) == Bits.of(np.eye(3, dtype=bool))
        True
    """

    shape: tuple[int, ...]
    packed: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, array: np.ndarray) -> "Bits":
        """Packs an array; everything other than 0 is True."""
        return cls(array.shape, np.packbits(array != 0).tobytes())

    def array(self) -> np.ndarray:
        """Unpacks to bool[shape]."""
        values = np.frombuffer(self.packed, np.uint8)
        count = int(np.prod(self.shape))
        return np.unpackbits(values, count=count).view(bool).reshape(self.shape)
