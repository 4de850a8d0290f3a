"""Arrays of truth values that caches can tell apart."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bits:
    """Truth values of an array; equal to others that hold the same.

    Args:
        shape: Shape of the array.
        packed: Its values, eight to a byte.

    Example:
        >>> Bits.of(np.eye(3)) == Bits.of(np.eye(3, dtype=bool))
        True
    """

    shape: tuple[int, ...]
    packed: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, array: np.ndarray) -> "Bits":
        """Reads an array.

        Args:
            array: Whatever is not 0 is true.

        Returns:
            Its truth values.
        """
        return cls(array.shape, np.packbits(array != 0).tobytes())

    def array(self) -> np.ndarray:
        """The truth values.

        Returns:
            bool[shape].
        """
        values = np.frombuffer(self.packed, np.uint8)
        count = int(np.prod(self.shape))
        return np.unpackbits(values, count=count).view(bool).reshape(self.shape)
