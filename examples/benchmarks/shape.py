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
        return tables + self._block_params + 2 * self.embed_size

    @property
    def matmul_params(self) -> int:
        """The N of 6 N: without the tables that are looked up; the tied head counts."""
        head = self.vocab_size * self.embed_size
        return head + self._block_params + 2 * self.embed_size

    @property
    def _block_params(self) -> int:
        width = self.embed_size
        return self.num_layers * (12 * width**2 + 13 * width)


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
