"""Counts against published sizes and against the models themselves."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from zjax.config import load_config
from zjax.estimate.traced import run_flops
from zjax.models import Decoder, Encoder
from zjax.models.build import make_model
from zjax.models.flops import flops_per_token, num_params, peak_flops
from zjax.settings import schema

GPT2 = schema.Model()
GPT2_XL = dataclasses.replace(
    GPT2, num_layers=48, embed_size=1600, mlp_size=6400, num_heads=25, num_kv_heads=25
)
LLAMA_8B = schema.Model(
    num_layers=32,
    embed_size=4096,
    mlp_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128_256,
    norm="rms_norm",
    positions=schema.Rotary(),
    activation="swiglu",
    use_bias=False,
    tied_head=False,
)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B, num_layers=16, embed_size=2048, mlp_size=8192, tied_head=True
)
QWEN3_30B = dataclasses.replace(
    LLAMA_8B,
    num_layers=48,
    embed_size=2048,
    num_kv_heads=4,
    head_size=128,
    query_key_norm=True,
    vocab_size=151_936,
    moe=schema.TokenChoice(num_experts=128, top_k=8, expert_size=768),
)
DEEPSEEK_V3 = dataclasses.replace(
    LLAMA_8B,
    num_layers=61,
    embed_size=7168,
    mlp_size=18_432,
    num_heads=128,
    num_kv_heads=0,
    positions=schema.Rotary(size=64),
    vocab_size=129_280,
    latent=schema.Latent(key_rank=512, query_rank=1536, plain_size=128, value_size=128),
    moe=schema.TokenChoice(
        num_experts=256,
        top_k=8,
        first_dense=3,
        expert_size=2048,
        num_shared=1,
        choice_bias=True,
    ),
)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(GPT2, 124_439_808, id="gpt2-124m"),
        pytest.param(GPT2_XL, 1_557_611_200, id="gpt2-1.5b"),
        pytest.param(LLAMA_8B, 8_030_261_248, id="llama-3-8b"),
        pytest.param(LLAMA_1B, 1_235_814_400, id="llama-3.2-1b-tied"),
        pytest.param(QWEN3_30B, 30_532_122_624, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V3, 671_026_419_200, id="deepseek-v3-671b"),
    ],
)
def test_num_params_is_the_published_one(model, expected):
    assert num_params(model) == expected


SMALL = schema.Model(
    num_layers=2, embed_size=24, mlp_size=40, num_heads=4, num_kv_heads=2, vocab_size=11
)

MOE = schema.TokenChoice(
    num_experts=(3, 5),
    expert_size=8,
    num_shared=2,
    shared_gate=True,
    residual=True,
    bias_rate=0.1,
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="decoder"),
        pytest.param({"use_bias": False}, id="decoder-without-bias"),
        pytest.param({"head_size": 10, "query_key_norm": True}, id="head-size-norms"),
        pytest.param(
            {"query_key_norm": True, "query_key_norm_scope": "heads"}, id="heads-norms"
        ),
        pytest.param({"attention_bias": "none"}, id="no-attention-bias"),
        pytest.param(
            {"norm_position": "both", "activation": "geglu"}, id="norms-of-both"
        ),
        pytest.param(
            {"use_bias": False, "attention_bias": "inputs"}, id="input-bias-alone"
        ),
        pytest.param({"norm": "rms_norm", "tied_head": False}, id="decoder-rms-untied"),
        pytest.param(
            {"positions": schema.Rotary(), "activation": "swiglu"}, id="decoder-swiglu"
        ),
        pytest.param({"moe": MOE}, id="experts"),
        *(
            pytest.param(
                {
                    "num_kv_heads": 4,
                    "positions": schema.Rotary(size=2),
                    "attention_bias": "none",
                    "latent": schema.Latent(
                        key_rank=5, query_rank=rank, plain_size=6, value_size=7
                    ),
                },
                id=f"latents-{rank}",
            )
            for rank in (0, 9)
        ),
        pytest.param({"kind": "encoder"}, id="encoder"),
        pytest.param(
            {"kind": "encoder", "use_bias": False, "tied_head": False},
            id="encoder-without-bias-untied",
        ),
    ],
)
def test_num_params_counts_the_arrays_of_the_model(changes):
    model = dataclasses.replace(SMALL, **changes)
    module = {"decoder": Decoder, "encoder": Encoder}[model.kind]
    made = nnx.eval_shape(lambda: module(model, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(made, nnx.Param))
    assert num_params(model) == sum(math.prod(array.shape) for array in arrays)


def test_values_of_latents_count_with_their_size():
    """Scores of 8 channels and averages of 4 cost as much as 6 of both."""
    size = schema.Latent(key_rank=5, plain_size=6, value_size=4)
    positions = schema.Rotary(size=2)
    model = dataclasses.replace(SMALL, num_kv_heads=4, positions=positions, latent=size)
    full, half = (
        flops_per_token(model, 10, causal_attention=x) for x in ("full", "half")
    )
    assert full - half == 6 * 2 * 4 * 6 * 10


def test_windows_see_fewer_pairs():
    """Two of three layers see 7 of the 10 pairs of four tokens."""
    window = schema.SlidingWindow(size=2, full_attention_every=3)
    model = dataclasses.replace(SMALL, num_layers=3, window=window)
    full = flops_per_token(
        dataclasses.replace(model, window=None), 4, causal_attention="half"
    )
    found = flops_per_token(model, 4, causal_attention="half")
    assert full - found == pytest.approx(6 * 24 * 4 * 2 * 0.3)


def by_hand(model, length, *, pairs):
    """Forward matrix products of one sequence, counted one by one, times 3."""
    width, kv = model.embed_size, model.num_kv_heads
    kv_size = kv * width // model.num_heads
    num_mlp = 3 if model.activation == "swiglu" else 2
    products = [(width, width), (width, kv_size), (width, kv_size), (width, width)]
    products += [(width, model.mlp_size)] * num_mlp
    forward = sum(2 * length * a * b for a, b in products)
    forward += 2 * (2 * pairs * width)
    total = model.num_layers * forward + 2 * length * width * model.vocab_size
    return 3 * total / length


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_1B], ids=["untied", "tied"])
@pytest.mark.parametrize("attention", ["half", "full"])
def test_flops_are_three_times_the_forward_products(model, attention):
    """Fails if a product is missed, or if a scale or a bias counts as one."""
    length = 2048
    pairs = {"half": length**2 / 2, "full": length**2}[attention]
    flops = flops_per_token(model, length, causal_attention=attention)
    assert flops == by_hand(model, length, pairs=pairs)


def test_attention_of_an_encoder_is_always_full():
    encoder = dataclasses.replace(GPT2, kind="encoder")
    half, full = (
        flops_per_token(encoder, 512, causal_attention=attention)
        for attention in ("half", "full")
    )
    assert half == full


@pytest.mark.parametrize(
    ("device_kind", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "float32", 156.0),
        ("NVIDIA A10G", "bfloat16", 70.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla V100-SXM2-16GB", "bfloat16", 15.7),
        ("Tesla V100-PCIE-32GB", "float16", 112.0),
        ("Tesla T4", "float16", 65.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
    ],
)
def test_peak_is_that_of_the_data_sheet(device_kind, dtype, teraflops):
    assert peak_flops(device_kind, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA RTX A4000", "NVIDIA H2000"])
def test_an_unknown_device_has_no_peak(device_kind):
    assert peak_flops(device_kind, "bfloat16") is None


WIDTH, LENGTH, VOCABULARY = 64, 32, 512
MATRICES = 4 * WIDTH**2, 2 * 4 * WIDTH**2
"""Entries of the matrices of attention and of the feed-forward."""
TWO_LAYERS = {
    "model.num_layers": 2,
    "model.embed_size": WIDTH,
    "model.num_heads": 4,
    "model.max_length": LENGTH,
    "model.vocab_size": VOCABULARY,
    "model.tied_head": False,
}


def products_of(**settings):
    """FLOPs per token outside of attention."""
    config = load_config(TWO_LAYERS | settings)
    model = make_model(config)
    return run_flops(model, model.inputs, config).products / LENGTH


def test_frozen_weights_have_no_gradient():
    """Fails if blocks below which nothing is trained compute gradients of inputs."""
    frozen = {"pattern": ".", "learning_rate_scale": 0.0}
    head = {"pattern": "^head/kernel", "learning_rate_scale": 2.0}
    found = products_of(**{"optimizer.groups": [head, frozen]})
    assert found == 2 * 2 * sum(MATRICES) + 4 * VOCABULARY * WIDTH


def test_frozen_masters_have_gradients():
    """Fails if a run on disks, which computes them all, counts fewer."""
    frozen = {"pattern": ".", "learning_rate_scale": 0.0}
    head = {"pattern": "^head/kernel", "learning_rate_scale": 2.0}
    offload = {"kind": "nvme", "nvme_paths": ["/tmp"]}
    settings = {"optimizer.groups": [head, frozen], "zero.offload": offload}
    assert products_of(**settings) == products_of()


def test_adapters_pass_gradients_on():
    """Frozen matrices cost 4, but the first ones, which read untrained embeddings, 2.

    Adapters cost 6, and their matrices that read embeddings 4.
    """
    rank, sides = 8, 4 * 2 * WIDTH + 2 * 5 * WIDTH
    lora = {"rank": rank, "also_train": ["^head/kernel"]}
    found = products_of(lora=lora)
    frozen = 2 * 4 * sum(MATRICES) - 3 * 2 * WIDTH**2
    adapters = 2 * 6 * rank * sides - 3 * 2 * rank * WIDTH
    assert found == frozen + adapters + 6 * VOCABULARY * WIDTH
