"""How steps of models of transformers are timed on one device."""

import timing
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Kernels in the order of preference."""


def settle(loss):
    """Waits for the device; the loss as a number."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return loss.item()


def time_and_print(shape, make_step, packages):
    """Times the steps of `make_step()`, and prints what a contest reads."""
    with sdpa_kernel(_ATTENTION, set_priority=True):
        seconds, losses = timing.time_steps(make_step(), settle)
    is_cuda = DEVICE == "cuda"
    timing.print_result(
        shape,
        seconds,
        losses,
        device=torch.cuda.get_device_name() if is_cuda else DEVICE,
        num_devices=1,
        peak_bytes=torch.cuda.max_memory_allocated() if is_cuda else None,
        packages=packages,
    )
