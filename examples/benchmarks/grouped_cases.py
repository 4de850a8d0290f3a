"""Cases of grouped matrix products, and the metrics that both sides print of them."""

import dataclasses

import call_timing
import numpy as np

PASSES = ("fwd", "dgrad", "wgrad")
CALLS_PER_ROUND = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows multiplied by the matrices of their groups, in bfloat16.

    Args:
        name: Name of the case.
        num_groups: Groups, each of which has a matrix.
        in_size: Rows of each matrix.
        out_size: Columns of each matrix.
        num_rows: Rows of all groups.
        is_even: Whether all groups have as many rows; else they follow Zipf's law.
    """

    name: str
    num_groups: int
    in_size: int
    out_size: int
    num_rows: int
    is_even: bool = False

    def metric(self, which: str, unit: str) -> str:
        return f"{self.name} {which} {unit}"

    def sizes(self) -> np.ndarray:
        """Rows of each group, int32[num_groups]."""
        if self.is_even:
            return np.full(self.num_groups, self.num_rows // self.num_groups, np.int32)
        shares = 1 / np.arange(1, self.num_groups + 1)
        sizes = np.floor(self.num_rows * shares / shares.sum()).astype(np.int32)
        sizes[0] += self.num_rows - sizes.sum()
        return np.random.default_rng(0).permutation(sizes)

    @property
    def flops(self) -> float:
        """FLOPs of each pass."""
        return 2.0 * self.num_rows * self.in_size * self.out_size

    @property
    def num_bytes(self) -> int:
        """Bytes of both operands and the result, the same in each pass."""
        matrices = self.num_groups * self.in_size * self.out_size
        return 2 * (self.num_rows * (self.in_size + self.out_size) + matrices)

    def describe(self, which: str, seconds: list[float]) -> dict[str, dict]:
        """TFLOP/s and bytes per second."""
        return {
            self.metric(which, "TFLOP/s"): call_timing.rates(
                self.flops / 1e12, seconds
            ),
            self.metric(which, "bytes/s"): call_timing.rates(self.num_bytes, seconds),
        }


ZIPF = (
    Case("Mixtral", 8, 4096, 14336, 16_384),
    Case("Qwen3-30B", 128, 2048, 1536, 131_072),
)
SMALL = Case("128 groups of 128 rows", 128, 1024, 4096, 16_384, is_even=True)
