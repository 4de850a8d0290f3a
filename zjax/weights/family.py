"""What a family of Hugging Face checkpoints says about config.json and tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zjax.weights.keys import Key
from zjax.weights.tensors import Row
from zjax.weights.windows import NO_WINDOWS, Windows

PADDING = 1
"""Default padding id, where positions depend on the padding id."""
DROPOUTS = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
"""Settings of dropout rates."""
BOOKKEEPING = frozenset(
    """
    _name_or_path architectures bos_token_id eos_token_id pad_token_id unk_token_id
    torch_dtype dtype transformers_version use_cache initializer_range model_type
    pretraining_tp task_specific_params output_attentions output_hidden_states
    return_dict torchscript summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj n_ctx id2label label2id
    problem_type is_decoder is_encoder_decoder reorder_and_upcast_attn max_window_layers
    """.split()
)
"""Keys that do not change the logits of a language model, unless a family fixes a
value."""
ROTARY = {"kind": "rotary", "pairs": "halves"}
"""Settings of rotary positions."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes how a kind of checkpoint becomes a decoder or an encoder.

    Args:
        architecture: Class of transformers.
        rows: Table of arrays and tensors.
        prefix: Start of tensor names, missing in checkpoints without a head.
        buffers: Pattern of tensors that outputs do not depend on.
        spellings: Endings of tensor names in old checkpoints, by usual ending.
        constant: Settings of every model of the family.
        keys: Keys that are settings.
        fixed: Keys with one meaning in zjax, and the values with that meaning; the
            first value is the default.
        biases: Keys of the biases of attention and of the feed-forward, False by
            default; empty if `constant` sets the biases.
        is_partial: Whether rotary positions may rotate only some channels of a head.
        windows: Layers with sliding windows.
        theta: Base of rotary positions, if a config.json has none.
        local_theta: Base of rotary positions in sliding layers; 0 for one base in all
            layers.
        dropouts: Keys of dropout rates, by setting; a rate without a key is 0.
        default_dropout: Dropout rate if the key is absent.
        padding: Key of the padding id, or empty. Positions start at padding id + 1, so
            the key of `max_length` includes that offset.
        unread: Keys without a meaning beside other keys.
        written: Values that exports write for keys without a meaning.
        predicts_more: Whether layers behind the last layer may predict further tokens.
        aliases: Usual keys, by name in some versions of transformers.
        has_steps: Whether keys tell which layers have experts.
        is_scaled: Whether positions are scaled where a config.json does not say so.
        scalings: Usual names of kinds of scaling, by other name.
    """

    architecture: str
    rows: tuple[Row, ...]
    prefix: str
    buffers: str
    constant: Mapping[str, Any]
    keys: Mapping[str, Key]
    fixed: Mapping[str, tuple[Any, ...]]
    biases: tuple[str, ...] = ()
    is_partial: bool = False
    windows: Windows = NO_WINDOWS
    theta: float = 10_000.0
    local_theta: float = 0.0
    dropouts: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"attention_dropout_rate": "attention_dropout"}
    )
    default_dropout: float = 0.0
    padding: str = ""
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    predicts_more: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_steps: bool = False
    is_scaled: bool = False
    scalings: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"su": "longrope"}
    )

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts."""
        return "moe" in self.constant

    @property
    def has_latents(self) -> bool:
        """Whether keys and values come from latents."""
        return self.constant["latent"] is not None

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotations, with keys for base and scaling."""
        return self.constant["positions"] == ROTARY

    @property
    def free(self) -> frozenset[str]:
        """Settings of a run that neither weights nor other keys depend on."""
        return frozenset({"max_length"} if self.is_rotary else ())

    def derived(
        self, architecture: str, *, defaults: Mapping[str, Any] = {}, **changes: Any
    ) -> "Family":
        """Returns a family with other values, and with changes of the tables.

        `defaults` are of keys of a config.json; a key of None is left out.
        """
        for table in {"constant", "keys", "fixed"} & {*changes}:
            changes[table] = {**getattr(self, table), **changes[table]}
        keys = changes.get("keys", self.keys)
        changes["keys"] = {
            name: dataclasses.replace(key, default=defaults.get(name, key.default))
            for name, key in keys.items()
            if key is not None
        }
        return dataclasses.replace(self, architecture=architecture, **changes)
