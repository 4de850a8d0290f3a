"""Settings and sections that are read only if another setting has some values."""

from typing import Any, NamedTuple

from zjax.settings import choices, schema


class Needs(NamedTuple):
    """Setting or section that is read only if a setting has one of some values."""

    setting: str
    other: str
    choices: tuple[Any, ...]


NEEDS = (
    Needs("zero.replicas", "zero.stage", (3,)),
    Needs("precision.reduce_dtype", "precision.compute_dtype", ("bfloat16", "float16")),
    Needs("precision.max_skipped_in_a_row", "precision.on_nonfinite", ("skip",)),
    Needs("precision.loss_scale", "precision.compute_dtype", ("float16",)),
    Needs(
        "model.activation_memory",
        "model.remat",
        ("elementwise", "attention_and_mlp", "attention", "full"),
    ),
    Needs("model.mlp_chunk_tokens", "model.remat", ("attention", "full")),
    Needs("model.query_key_norm_scope", "model.query_key_norm", (True,)),
    Needs("model.norm_position", "model.kind", ("decoder",)),
    Needs("data.path", "data.source", ("tokens",)),
    Needs("data.masking", "model.kind", ("encoder",)),
)


def unread(config: schema.Config) -> set[str]:
    """Paths of settings and sections that a run does not read.

    Example:
        >>> "precision.loss_scale" in unread(schema.Config())
        True
    """
    found = {
        x.setting for x in NEEDS if choices.value_at(config, x.other) not in x.choices
    }
    return found | ({"pipeline"} if config.mesh.pipeline == 1 else set())
