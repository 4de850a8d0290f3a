"""Packed messages and their mean over explicit workers, one block at a time."""

import ml_dtypes
import numpy as np


def restored(name, x, block=8, kept=2):
    """What a receiver of float32[n] has, after one message."""
    if name in ("float32", "bfloat16"):
        return x.astype(name if name == "float32" else ml_dtypes.bfloat16).astype("f4")
    blocks = [
        _restored_block(name, part, kept)
        for part in np.split(x, max(1, len(x) // block))
    ]
    return np.concatenate(blocks).astype(np.float32)


def _restored_block(name, x, kept):
    largest = np.abs(x).max()
    if name == "onebit":
        scale = np.sqrt((np.float64(x) ** 2).mean())
        return np.where(x >= 0, scale, -scale)
    if name == "top_k":
        positions = np.argsort(-np.abs(x), kind="stable")[:kept]
        return _two_magnitudes(x, positions, _middle(np.abs(x[positions])))
    if name == "int2":
        return _two_magnitudes(x, slice(None), 1.25 * np.abs(x).mean())
    if largest == 0:
        return x
    if name == "float8":
        scale = largest / np.float32(448)
        return (x * (1 / scale)).astype(ml_dtypes.float8_e4m3fn).astype("f4") * scale
    levels = {"int8": 128, "int4": 8}[name]
    per_unit = np.float32(levels) / largest
    return np.clip(np.rint(x * per_unit), -levels, levels - 1) / per_unit


def _middle(magnitudes):
    return (magnitudes.max() + magnitudes.min()) / 2


def _two_magnitudes(x, positions, boundary):
    magnitudes = np.abs(x[positions])
    is_high = magnitudes >= boundary
    means = np.zeros_like(magnitudes)
    for group in (is_high, ~is_high):
        means[group] = magnitudes[group].mean() if group.any() else 0
    result = np.zeros_like(x)
    result[positions] = np.where(x[positions] < 0, -1, 1) * means
    return result


class Workers:
    """N workers that average vectors of n numbers through packed messages."""

    def __init__(self, name, num_workers, n, **sizes):
        self.restored = lambda x: restored(name, x, **sizes)
        self.worker_errors = np.zeros((num_workers, n), np.float32)
        self.server_errors = np.zeros((num_workers, n // num_workers), np.float32)

    def mean(self, vectors):
        """The mean that every worker receives, of float32[N, n]."""
        num_workers = len(vectors)
        sums = vectors + self.worker_errors
        messages = np.stack([self.restored(total) for total in sums])
        self.worker_errors = sums - messages
        received = []
        for server, chunks in enumerate(np.split(messages, num_workers, axis=1)):
            total = chunks.mean(axis=0) + self.server_errors[server]
            received.append(self.restored(total))
            self.server_errors[server] = total - received[-1]
        return np.concatenate(received)
