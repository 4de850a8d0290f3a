"""FLOPs and parameters of a model, counted in its traced loss; FLOP/s of devices."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal

import jax

from zjax.jaxprs.flops import Flops
from zjax.models.build import make_model
from zjax.settings import schema
from zjax.settings.mixture import experts_per_token
from zjax.sharding.activations import rows_of
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.stack.traced import flops_of, trace_parts
from zjax.typing import Batch, Model

CausalAttention = Literal["half", "full"]
_EXPERTS_DIM = 1
"""Dim of the experts in stacked arrays, behind the dim of the layers."""


def flops_per_row(
    model: Model, batch: Batch, is_trained: Callable[[str], bool] = lambda path: True
) -> Flops:
    """Counts the FLOPs of a training step per row of a batch, as `count_flops`.

    `is_trained(path)` says which parameters get a gradient.
    """
    parts = trace_parts(model, batch)
    total = flops_of(parts, is_trained)
    return total * (1 / _num_rows(model, batch))


def _num_rows(model: Model, batch: Batch) -> int:
    """Number of rows of a batch; arrays without rows do not count."""
    return max((x.shape[0] for _, x in rows_of(batch, model.entries)), default=1)


def flops_per_token(
    model: schema.Model, length: int, *, causal_attention: CausalAttention
) -> float:
    """Counts the FLOPs of forward and backward pass per token, without recomputation.

    The products of the loss count three times: forward, and the gradients of both
    operands. Pairs of tokens that causality hides count in full, or not at all ("half")
    if `causal_attention` says so; an encoder hides none. Sparse attention and sliding
    windows count the pairs that they leave.

    Reference:
        Narayanan et al., arXiv:2104.04473, appendix; PaLM, arXiv:2204.02311, appendix
        B.
    """
    total = _flops_per_token(model, length)
    return total.seen if causal_attention == "half" else total.full


def num_params(model: schema.Model, *, active: bool = False) -> int:
    """Counts parameters of a built-in model; `active` counts what a token uses."""
    params, _ = jax.eval_shape(_build(model, 1).init, abstract_key())
    total = 0
    for keys, array in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(array.shape)
        if active and model.moe and "/experts/" in path_of(keys):
            number = array.shape[_EXPERTS_DIM]
            used = min(experts_per_token(model.moe), number)
            size = round(used * size / number)
        total += size
    return total


def _flops_per_token(model: schema.Model, length: int) -> Flops:
    built = _build(model, length)
    return flops_per_row(built, built.inputs) * (1 / length)


def _build(model: schema.Model, length: int) -> Model:
    """Makes a model of exactly the given shape, for rows of `length` tokens."""
    # A vocabulary that was derived, not set, would be derived anew from the data.
    model = dataclasses.replace(model, vocab_size=int(model.vocab_size))
    return make_model(schema.Config(model=model, data=schema.Data(length=length)))


_PEAKS: dict[str, tuple[float, float, float]] = {
    "H200": (989.4, 989.4, 494.7),
    "GH200": (989.4, 989.4, 494.7),
    "H100 PCIe": (756.0, 756.0, 378.0),
    "H100 NVL": (835.0, 835.0, 417.5),
    "H100": (989.4, 989.4, 494.7),
    "H20": (148.0, 148.0, 74.0),
    "B200": (2250.0, 2250.0, 1125.0),
    "GB200": (2500.0, 2500.0, 1250.0),
    "A100": (312.0, 312.0, 156.0),
    "A800": (312.0, 312.0, 156.0),
    "A40": (149.7, 149.7, 74.8),
    "A30": (165.0, 165.0, 82.0),
    "A10": (125.0, 125.0, 62.5),
    "A10G": (70.0, 70.0, 35.0),
    "RTX A6000": (154.8, 154.8, 77.4),
    "L40S": (362.0, 362.0, 183.0),
    "L40": (181.0, 181.0, 90.5),
    "L4": (121.0, 121.0, 60.0),
    "RTX 3090": (71.0, 71.0, 35.6),
    "RTX 4090": (165.2, 165.2, 82.6),
    "RTX 5090": (209.5, 209.5, 104.8),
    "V100-PCIE": (14.0, 112.0, 14.0),
    "V100": (15.7, 125.0, 15.7),
    "T4": (8.1, 65.0, 8.1),
}
"""Dense TFLOP/s per device in bfloat16, float16 and float32 with float32 accumulation,
from data sheets. float32 means TF32 where the device has it; bfloat16 means float32
where the device lacks bfloat16 units. First match wins."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns peak FLOP/s by `jax.Device.device_kind`; None for a device like a CPU."""
    column = ("bfloat16", "float16", "float32").index(dtype)
    name = find_kind(device_kind, _PEAKS)
    return _PEAKS[name][column] * 1e12 if name else None


def find_kind(device_kind: str, names: Iterable[str]) -> str:
    """Finds the first name that is in a `jax.Device.device_kind`; "" if there is none.

    Example:
        >>> find_kind("NVIDIA L40S", ("L4", "L40", "L40S"))
        'L40S'
    """
    # Spaces keep L4 from matching L40 and A10 from matching A100.
    words = f" {device_kind} ".replace("-", " ")
    return next((x for x in names if f" {x} ".replace("-", " ") in words), "")
