"""Quantised checkpoints, and what their codes mean, one by one in Python floats."""

import itertools
import json

import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.support import huggingface as golden


def fp4_value(code):
    """E2M1: a sign, two bits of exponent of bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -value if sign else float(value)


def fp8_value(code):
    """E4M3FN: a sign, four bits of exponent of bias 7, three of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    value = mantissa / 8 * 2**-6 if exponent == 0 else 0.0
    value = value or (1 + mantissa / 8) * 2.0 ** (exponent - 7) * (exponent > 0)
    return -value if sign else value


def plain_mxfp4(blocks, scales):
    """Plain matrices, [experts, inputs, outputs], of stored ones."""
    num_experts, outputs, num_blocks, _ = blocks.shape
    plain = np.zeros((num_experts, num_blocks * 32, outputs))
    for expert, output, block in np.ndindex(scales.shape):
        scale = int(scales[expert, output, block])
        factor = float("nan") if scale == 255 else 2.0 ** (scale - 127)
        for place, byte in enumerate(blocks[expert, output, block].tolist()):
            first = block * 32 + 2 * place
            plain[expert, first, output] = fp4_value(byte & 15) * factor
            plain[expert, first + 1, output] = fp4_value(byte >> 4) * factor
    with np.errstate(over="ignore"):
        return plain.astype(np.float32)


def plain_fp8(codes, scales, block):
    """The plain matrix of a stored one."""
    values = np.array([fp8_value(x) for x in range(256)])
    plain = values[codes.view(np.uint8)]
    with np.errstate(over="ignore", invalid="ignore"):
        for i, j in np.ndindex(codes.shape):
            plain[i, j] *= float(scales[i // block[0], j // block[1]])
        return plain.astype(np.float32)


def random_fp8(shape, block, rng):
    """Codes and scales whose values are about those of fresh weights."""
    codes = rng.standard_normal(shape).astype(np.float32) * 100
    grid = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    scales = rng.uniform(5e-4, 5e-3, grid).astype(np.float32)
    return codes.astype(ml_dtypes.float8_e4m3fn), scales


def random_mxfp4(shape, rng):
    """Blocks and scales of matrices, [experts, inputs, outputs]."""
    num_experts, inputs, outputs = shape
    grid = num_experts, outputs, -(-inputs // 32)
    blocks = rng.integers(0, 256, (*grid, 16), np.uint8)
    return blocks, rng.integers(119, 124, grid, np.uint8)


def write(folder, tensors, **changes):
    """Writes tensors, and changes keys of the config.json beside them."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tensors = {n: np.ascontiguousarray(x) for n, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


def write_fp8(stored, plain, family="deepseek_v3", block=(4, 3), skipped=("lm_head",)):
    """Writes a checkpoint whose matrices are quantised, and the plain one.

    Returns the tensors of the former.
    """
    rng = np.random.default_rng(0)
    codes, values = {}, {}
    for name, array in read(family).items():
        is_matrix = name.endswith("proj.weight") or "_proj_with_mqa" in name
        codes[name] = values[name] = array
        if is_matrix and not any(x in name for x in skipped):
            found = random_fp8(array.shape, block, rng)
            codes[name], codes[f"{name}_scale_inv"] = found
            values[name] = plain_fp8(*found, block)
    golden.copy(family, stored)
    golden.copy(family, plain)
    write(plain, values)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": block, "modules_to_not_convert": skipped}
    write(stored, codes, quantization_config=settings)
    return codes


def write_mxfp4(stored, plain):
    """Writes a gpt-oss whose experts are quantised, and the plain one.

    It is wider than that of the golden files: inputs are several blocks.
    """
    rng = np.random.default_rng(0)
    codes, values = {}, {}
    for name, array in read("gpt_oss").items():
        wider = {16: 64, 12: 96, 24: 192} if "experts" in name else {16: 64}
        shape = [wider.get(n, n) for n in array.shape]
        if "experts" in name and len(shape) == 3:
            found = random_mxfp4(shape, rng)
            codes[f"{name}_blocks"], codes[f"{name}_scales"] = found
            values[name] = plain_mxfp4(*found)
        else:
            array = rng.standard_normal(shape).astype(np.float32) / 8
            codes[name] = values[name] = array
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    golden.copy("gpt_oss", stored)
    golden.copy("gpt_oss", plain)
    write(plain, values, **sizes)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    write(stored, codes, quantization_config=settings, **sizes)
    return codes


def read(family):
    """The tensors of a golden checkpoint."""
    files = sorted((golden.FOLDER / family).glob("*.safetensors"))
    pairs = (safetensors.numpy.load_file(file).items() for file in files)
    return dict(itertools.chain(*pairs))
