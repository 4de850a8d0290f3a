"""The model that every peer trains, as arguments: a GPT-2 shaped decoder."""

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    num_layers: int
    embed_size: int
    num_heads: int
    vocab_size: int
    length: int  # tokens per sequence
    microbatch_size: int  # sequences per device

    @property
    def num_params(self) -> int:
        tables = (self.vocab_size + self.length) * self.embed_size
        vectors = (13 * self.num_layers + 2) * self.embed_size
        return tables + self._block_matrices + vectors

    @property
    def matmul_params(self) -> int:
        """The N of 6 N: entries of matrices, the tied head among them."""
        return self.vocab_size * self.embed_size + self._block_matrices

    @property
    def _block_matrices(self) -> int:
        return 12 * self.num_layers * self.embed_size**2


GPT_6P7B = Shape(
    num_layers=32,
    embed_size=4096,
    num_heads=32,
    vocab_size=50304,
    length=4096,
    microbatch_size=2,
)


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, required=True)
    return parser


def shape_of(given: argparse.Namespace) -> Shape:
    names = [field.name for field in dataclasses.fields(Shape)]
    return Shape(**{name: getattr(given, name) for name in names})
