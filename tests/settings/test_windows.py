"""Settings of windows, soft caps and dropout of attention, with their refusals."""

import pytest

from tests.support.refusals import case, refusal

WINDOW = "model.sliding_window=8;"

RULES = [
    case(
        WINDOW + "model.kind=encoder",
        "model.sliding_window=8 does not go with model.kind='encoder', which looks "
        "ahead; use 0",
        id="encoder",
    ),
    case(
        WINDOW + "sequence_warmup=window",
        "model.sliding_window=8 does not go with sequence_warmup='window', "
        "another window; use 0",
        id="another-window",
    ),
    case(
        WINDOW + "random_ltd=span",
        "model.sliding_window=8 does not go with random_ltd='span', which drops "
        "tokens of it; use 0",
        id="dropped-tokens",
    ),
    case(
        WINDOW + "model.attention=sparse",
        "model.sliding_window=8 is not a pattern of model.attention='sparse'; use 0, "
        "or attention.pattern='local'",
        id="sparse",
    ),
    case(
        WINDOW + "model.full_attention_every=2;model.mlp_tiles=2",
        "model.full_attention_every=2 makes blocks of 2 layers, and model.mlp_tiles=2 "
        "needs others; use 0, or model.mlp_tiles=1",
        id="tiles",
    ),
    case(
        WINDOW + "model.full_attention_every=1",
        "model.full_attention_every=1 lets no layer slide; use 0 for both, or 2 or "
        "more",
        id="no-layer",
    ),
    case(
        "model.full_attention_every=2",
        "model.full_attention_every=2 has no effect with model.sliding_window=0; leave "
        "it at 0, or set model.sliding_window",
        id="no-window",
    ),
    case(
        WINDOW + "mesh.sequence=8",
        "model.sequence_attention='auto' takes the ring, which does not bound "
        "attention by model.sliding_window=8; use 'ulysses' with a multiple of 8 "
        "heads, or 0 there",
        id="ring-by-itself",
    ),
    case(
        "model.attention_soft_cap=50.0;mesh.sequence=4;model.sequence_attention=ring",
        "model.sequence_attention='ring' does not bound attention by "
        "model.attention_soft_cap=50.0; use 'ulysses' with a multiple of 4 heads, or "
        "0 there",
        id="ring",
    ),
    case(
        "model.attention_soft_cap=50.0;model.attention=cudnn",
        "model.attention_soft_cap=50.0 bounds scores, which model.attention='cudnn' "
        "cannot; use 0, or model.attention='xla'",
        id="cudnn",
    ),
    *(
        case(
            f"model.attention_dropout_rate=0.1;model.attention={kernel}",
            "model.attention_dropout_rate=0.1 drops attention weights, which "
            f"model.attention='{kernel}' cannot; use 0, or model.attention='xla'",
            id=f"dropout-{kernel}",
        )
        for kernel in ("cudnn", "sparse")
    ),
    *(
        case(
            f"model.attention_sinks=True;model.attention={kernel}",
            "model.attention_sinks=True adds scores without keys, which "
            f"model.attention='{kernel}' cannot; use False, or model.attention='xla'",
            id=f"sinks-{kernel}",
        )
        for kernel in ("cudnn", "sparse")
    ),
    case(
        "model.attention_sinks=True;mesh.sequence=8",
        "model.sequence_attention='auto' takes the ring, which has no scores without "
        "keys, as model.attention_sinks=True needs; use 'ulysses' with a multiple of 8 "
        "heads, or 0 there",
        id="sinks-ring",
    ),
    case(
        f"{WINDOW};model.full_attention_every=2;model.moe.num_experts=4;"
        "model.moe.top_k=2;model.moe.bias_rate=0.1",
        "model.moe.bias_rate=0.1 moves by the load of a block of one layer, and "
        "model.full_attention_every=2 makes blocks of 2; use 0 for either",
        id="loads-of-two-layers",
    ),
    case(
        "model.attention_dropout_rate=0.1;mesh.sequence=8",
        "model.sequence_attention='auto' takes the ring, which drops no weights by "
        "model.attention_dropout_rate=0.1; use 'ulysses' with a multiple of 8 heads, "
        "or 0 there",
        id="dropout-ring",
    ),
    case(
        "model.logit_soft_cap=30.0;distill.teacher=teacher",
        "model.logit_soft_cap=30.0 bounds logits, which distill.teacher does not; use "
        "0",
        id="teacher",
    ),
    case(
        "model.activation=geglu;model.moe.num_experts=2",
        "model.activation='geglu' is no activation of experts; use 'swiglu' or 'gelu'",
        id="experts",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), RULES)
def test_rule(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message
