"""Checks that a run is the same bits in all batches, where `batch_invariant` asks."""

from collections.abc import Iterator
from typing import Any

from zjax.errors import Problem
from zjax.settings import axes, choices, schema

FIELD = "precision.batch_invariant"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "zero.replicas": (None,),
    "precision.matmul_dtype": ("compute",),
    "model.kind": ("decoder",),
    "model.attention": ("auto",),
    "model.dropout_rate": (0.0,),
    "model.embedding_dropout_rate": (-1.0, 0.0),
    "model.attention_dropout_rate": (0.0,),
    "model.positions.scaling": (None, "linear", "yarn", "llama3"),
    "model.moe": (None, "token_choice"),
    "model.moe.drop": ("none", None),
    "model.moe.jitter": (0.0, None),
    "model.moe.sampling": ("none", None),
    "model.moe.residual": (False, None),
    "model.moe.shared_gate": (False, None),
    "sequence_warmup": (None, "truncate", "reshape"),
    "random_ltd": (None,),
    "layer_drop": (None,),
    "lora.form": ("lora", None),
    "lora.dropout": (0.0, None),
    "lora.quantize": (None,),
    "quantize": (None,),
}
"""Values beside which log-probabilities of a token are the same bits, by setting,
the first to be advised."""
_UNSPLIT = "tensor", "sequence", "expert", "pipeline"
"""Axes of the mesh that may not split a model."""


def invariance_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings under which a token's numbers depend on the batch."""
    if not config.precision.batch_invariant:
        return
    given = {name: choices.value_at(config, name) for name in _ALLOWED}
    for name, value in given.items():
        if value not in _ALLOWED[name]:
            yield _problem(f"{name}={value!r}", f"{_ALLOWED[name][0]!r} there")
    if axes.mesh_fills(config, num_devices):
        sizes = axes.axis_sizes(config, num_devices)
        for axis in _UNSPLIT:
            if sizes[axis] > 1:
                yield _problem(f"mesh.{axis}={sizes[axis]}", "1 there")


def _problem(other: str, allowed: str) -> Problem:
    """Describes a setting that rules the same bits out."""
    problem = f"does not hold with {other}"
    return Problem(FIELD, True, problem, f"use False, or {allowed}")
