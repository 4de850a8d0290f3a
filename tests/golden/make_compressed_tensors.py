"""Writes tests/golden/compressed_tensors.npz, with the library of the format.

Run:    python tests/golden/make_compressed_tensors.py
Needs:  pip install torch compressed-tensors numpy
        (torch 2.14.1 and compressed-tensors 0.20.1 wrote the file that is there)
"""

import pathlib

import numpy as np
import torch
from compressed_tensors.compressors.naive_quantized import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
)
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

PATH = pathlib.Path(__file__).parent / "compressed_tensors.npz"
GROUP = 8
SCHEMES = {
    "w4a16": (
        PackedQuantizationCompressor,
        QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP),
        7,
    ),
    "w8a8": (
        IntQuantizationCompressor,
        QuantizationArgs(num_bits=8, strategy="channel"),
        127,
    ),
    "fp8": (
        FloatQuantizationCompressor,
        QuantizationArgs(num_bits=8, type="float", strategy="channel"),
        448,
    ),
}


def matrices() -> dict[str, torch.Tensor]:
    """Matrices of usual and of hard values; no width is a multiple of 32."""
    generator = torch.Generator().manual_seed(0)
    outlier = torch.full((2, 24), 0.01)
    outlier[1, 3] = 1e4
    return {
        "random": torch.randn((5, 24), generator=generator),
        "outlier": outlier,
        "one_value": torch.full((2, 24), -0.3),
        "narrow": torch.randn((3, 8), generator=generator),
    }


def main() -> None:
    """Writes codes and scales of every matrix in every scheme."""
    arrays = dict[str, np.ndarray]()
    for name, weight in matrices().items():
        arrays[f"{name}/weight"] = weight.numpy()
        for scheme, (compressor, args, last) in SCHEMES.items():
            size = args.group_size or weight.shape[1]
            groups = weight.reshape(len(weight), -1, size)
            scale = groups.abs().amax(-1) / last
            given = {"weight": weight, "weight_scale": scale}
            found = compressor.compress(
                given, QuantizationScheme(targets=["Linear"], weights=args)
            )
            for ending, value in found.items():
                stored = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
                arrays[f"{name}/{scheme}/{ending}"] = stored.numpy()
            back = compressor.decompress(
                found, QuantizationScheme(targets=["Linear"], weights=args)
            )
            arrays[f"{name}/{scheme}/plain"] = back["weight"].float().numpy()
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
