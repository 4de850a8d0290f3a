"""A mixture of experts of transformers in Qwen3's shape, whole compiled steps.

python examples/benchmarks/moe_step_torch.py --num_microbatches=4

`Qwen3MoeForCausalLM` with `experts_implementation="grouped_mm"`; weights and moments
are bfloat16.
"""

import argparse

import torch
import transformers_steps
from mixtures import QWEN3
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


def make_model(mixture):
    config = Qwen3MoeConfig(
        num_hidden_layers=mixture.num_layers,
        hidden_size=mixture.embed_size,
        moe_intermediate_size=mixture.mlp_size,
        num_attention_heads=mixture.num_heads,
        num_key_value_heads=mixture.num_kv_heads,
        head_dim=mixture.head_size,
        vocab_size=mixture.vocab_size,
        num_experts=mixture.num_experts,
        num_experts_per_tok=mixture.top_k,
        norm_topk_prob=True,
        max_position_embeddings=mixture.length,
        use_cache=False,
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(transformers_steps.DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make_step(mixture, num_microbatches):
    """A step on one batch of random tokens, in microbatches; returns its loss."""
    model = make_model(mixture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = mixture.microbatch_size, mixture.length
    tokens = torch.randint(mixture.vocab_size, size, device=transformers_steps.DEVICE)
    compiled = torch.compile(model, dynamic=False)

    def step():
        total = 0.0
        for part in tokens.chunk(num_microbatches):
            loss = compiled(input_ids=part, labels=part).loss / num_microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_microbatches", type=int, required=True)
    given = parser.parse_args()
    transformers_steps.time_and_print(
        QWEN3,
        lambda: make_step(QWEN3, given.num_microbatches),
        ("torch", "transformers"),
    )


if __name__ == "__main__":
    main()
