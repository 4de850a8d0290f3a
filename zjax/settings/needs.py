"""Settings that are read only if a setting of another section has some values."""

import dataclasses
from typing import Any, NamedTuple

from zjax.settings import choices, schema


class Needs(NamedTuple):
    """Setting that is read only if a second setting has one of some values."""

    setting: str
    other: str
    choices: tuple[Any, ...]


NEEDS = (
    Needs("zero.replicas", "zero.stage", (3,)),
    Needs("precision.reduce_dtype", "precision.compute_dtype", ("bfloat16", "float16")),
    Needs("precision.max_skipped_in_a_row", "precision.on_nonfinite", ("skip",)),
    *(
        Needs(
            f"precision.loss_scale.{field.name}",
            "precision.compute_dtype",
            ("float16",),
        )
        for field in dataclasses.fields(schema.LossScale)
    ),
    Needs(
        "model.activation_memory",
        "model.remat",
        ("elementwise", "attention_and_mlp", "attention", "full"),
    ),
    Needs("model.mlp_chunk_tokens", "model.remat", ("attention", "full")),
    Needs("model.query_key_norm_scope", "model.query_key_norm", (True,)),
    Needs("model.norm_position", "model.kind", ("decoder",)),
    Needs("data.path", "data.source", ("tokens",)),
    Needs("data.masking.fraction", "model.kind", ("encoder",)),
    Needs("data.masking.mask_id", "model.kind", ("encoder",)),
)


def unread(config: schema.Config) -> set[str]:
    """Paths of settings that a run does not read.

    Example:
        >>> "precision.loss_scale.window" in unread(schema.Config())
        True
    """
    found = {
        x.setting for x in NEEDS if choices.value_at(config, x.other) not in x.choices
    }
    if config.mesh.pipeline == 1:
        names = choices.names(type(config.pipeline))
        found |= {"pipeline", *(f"pipeline.{name}" for name in names)}
    return found
