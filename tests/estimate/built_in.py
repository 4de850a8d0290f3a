"""Runs of built-in models whose costs are compared with recorded ones."""

from typing import NamedTuple

from zjax.config import load_config

GPT = {
    "num_layers": 12,
    "embed_size": 768,
    "num_heads": 12,
    "vocab_size": 50_304,
    "max_length": 1024,
}
LLAMA = {
    "num_layers": 16,
    "embed_size": 2048,
    "mlp_size": 8192,
    "num_heads": 32,
    "num_kv_heads": 8,
    "vocab_size": 128_256,
    "max_length": 4096,
    "norm": "rms_norm",
    "positions": "rotary",
    "activation": "swiglu",
    "use_bias": False,
    "tied_head": False,
}
TOKENS = {"kind": "token_choice", "num_experts": 8, "top_k": 2}
LATENT = {"key_rank": 512, "query_rank": 768, "plain_size": 128, "value_size": 128}


def run_of(model, num_devices=1, **settings):
    """Config of a run and its number of devices."""
    sizes = {"microbatch_size": 4, "num_microbatches": 1, "global_batch_size": 0}
    settings = sizes | settings
    return load_config({"model": model} | settings), num_devices


def remat(name):
    return run_of(GPT | {"remat": name})


RUNS = {
    "gpt": run_of(GPT),
    "gpt-none": remat("none"),
    "gpt-dots": remat("dots"),
    "gpt-attention_and_mlp": remat("attention_and_mlp"),
    "gpt-attention": remat("attention"),
    "gpt-full": remat("full"),
    "gpt-full-host": run_of(
        GPT | {"remat": "full", "activation_memory": "pinned_host"}
    ),
    "gpt-scan": run_of(GPT | {"layers_per_scan": 4, "remat": "attention"}),
    "gpt-scan-none": run_of(GPT | {"layers_per_scan": 1, "remat": "none"}),
    "gpt-xla": run_of(GPT | {"attention": "xla"}),
    "gpt-float32": run_of(GPT, precision={"compute_dtype": "float32"}),
    "gpt-chunks": run_of(
        GPT | {"loss_chunk_tokens": 1024, "mlp_chunk_tokens": 1024, "remat": "full"}
    ),
    "llama": run_of(LLAMA, microbatch_size=1),
    "llama-full": run_of(LLAMA | {"remat": "full"}, microbatch_size=1),
    "llama-lora": run_of(LLAMA, lora={"rank": 16}),
    "multi-query": run_of(LLAMA | {"num_kv_heads": 1}, microbatch_size=1),
    "latent": run_of(
        LLAMA
        | {
            "num_heads": 16,
            "num_kv_heads": 0,
            "positions": {"kind": "rotary", "size": 64},
            "latent": LATENT,
        },
        microbatch_size=1,
    ),
    "experts": run_of(GPT | {"moe": TOKENS}),
    "experts-every-2": run_of(
        GPT | {"moe": TOKENS | {"every": 2, "num_shared": 1}, "activation": "swiglu"}
    ),
    "expert-choice": run_of(GPT | {"moe": {"kind": "expert_choice"}}),
    "experts-split": run_of(GPT | {"moe": TOKENS}, 4, mesh={"expert": 4}),
    "experts-split-tensor": run_of(
        GPT | {"moe": TOKENS}, 4, mesh={"expert": 2, "tensor": 2}
    ),
    "sparse": run_of(GPT | {"attention": "sparse"}),
    "windows": run_of(
        LLAMA
        | {
            "window": {"kind": "sliding_window", "size": 512, "full_attention_every": 4}
        },
        microbatch_size=1,
    ),
    "pipeline": run_of(
        GPT | {"remat": "attention"}, 2, mesh={"pipeline": 2}, num_microbatches=8
    ),
    "tensor": run_of(LLAMA, 2, mesh={"tensor": 2}, microbatch_size=2),
    "sequence": run_of(LLAMA, 2, mesh={"sequence": 2}, microbatch_size=2),
    "encoder": run_of(GPT | {"kind": "encoder"}),
    "dropout": run_of(GPT | {"dropout_rate": 0.1}),
}


class Recorded(NamedTuple):
    """Predictions of the formulas that the count replaced, revision b07f4f54."""

    state: float
    """Bytes of state and gradients on a device."""
    activations: float
    """Bytes of activations on a device."""
    half: float
    """FLOPs per token, pairs hidden by causality not counted."""
    full: float
    """FLOPs per token, all pairs counted."""


RECORDED = {
    "gpt": Recorded(2_240_566_280, 2_347_106_304, 798_759_936, 855_383_040),
    "gpt-none": Recorded(2_240_566_280, 2_800_091_136, 798_759_936, 855_383_040),
    "gpt-dots": Recorded(2_240_566_280, 2_347_106_304, 798_759_936, 855_383_040),
    "gpt-attention_and_mlp": Recorded(
        2_240_566_280, 2_045_116_416, 798_759_936, 855_383_040
    ),
    "gpt-attention": Recorded(2_240_566_280, 1_743_126_528, 798_759_936, 855_383_040),
    "gpt-full": Recorded(2_240_566_280, 1_667_629_056, 798_759_936, 855_383_040),
    "gpt-full-host": Recorded(2_240_566_280, 1_592_131_584, 798_759_936, 855_383_040),
    "gpt-scan": Recorded(2_240_566_280, 1_743_126_528, 798_759_936, 855_383_040),
    "gpt-scan-none": Recorded(2_240_566_280, 2_800_091_136, 798_759_936, 855_383_040),
    "gpt-xla": Recorded(2_240_566_280, 3_353_739_264, 798_759_936, 855_383_040),
    "gpt-float32": Recorded(2_489_518_088, 4_923_457_536, 798_759_936, 855_383_040),
    "gpt-chunks": Recorded(2_240_566_280, 664_928_256, 798_759_936, 855_383_040),
    "llama": Recorded(26_972_688_392, 8_178_892_800, 8_220_192_768, 9_025_499_136),
    "llama-full": Recorded(26_972_688_392, 5_091_885_056, 8_220_192_768, 9_025_499_136),
    "llama-lora": Recorded(3_199_864_840, 20_107_493_376, 5_748_563_968, 6_553_870_336),
    "multi-query": Recorded(
        26_444_206_088, 8_046_772_224, 8_044_032_000, 8_849_338_368
    ),
    "latent": Recorded(27_237_298_184, 9_434_038_272, 8_509_722_624, 9_516_355_584),
    "experts": Recorded(9_382_358_024, 2_800_091_136, 1_139_217_408, 1_195_840_512),
    "experts-every-2": Recorded(
        6_322_590_728, 3_001_417_728, 1_139_143_680, 1_195_766_784
    ),
    "expert-choice": Recorded(9_382_358_024, 2_372_272_128, 799_202_304, 855_825_408),
    "experts-split": Recorded(
        2_449_308_680, 4_058_382_336, 1_139_217_408, 1_195_840_512
    ),
    "experts-split-tensor": Recorded(
        2_385_592_328, 1_827_864_576, 1_139_217_408, 1_195_840_512
    ),
    "sparse": Recorded(2_240_566_280, 2_347_106_304, 766_909_440, 766_909_440),
    "windows": Recorded(26_972_688_392, 8_178_892_800, 7_757_754_628, 8_100_622_856),
    "pipeline": Recorded(1_628_430_344, 991_100_928, 798_759_936, 855_383_040),
    "tensor": Recorded(13_486_952_456, 6_077_546_496, 8_220_192_768, 9_025_499_136),
    "sequence": Recorded(14_985_367_560, 8_178_892_800, 8_220_192_768, 9_025_499_136),
    "encoder": Recorded(2_252_130_056, 2_347_106_304, 859_237_632, 859_237_632),
    "dropout": Recorded(2_240_566_280, 2_347_106_304, 798_759_936, 855_383_040),
}
