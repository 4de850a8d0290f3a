"""LoRA on Llama 3 8B by peft and transformers, whole steps on one device.

python examples/benchmarks/lora_peft.py [--microbatch_size=1] [--is_compiled=1]

Random weights in bfloat16, adapters of rank 16 on all linear layers of blocks,
checkpoints at each layer.
"""

import argparse
import dataclasses

import llama
import torch
import transformers_steps
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPE = llama.Llama()
RANK, ALPHA = 16, 32


def make_model(shape):
    config = LlamaConfig(
        **shape.settings(), use_cache=False, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device(transformers_steps.DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return get_peft_model(model, adapters)


def make_step(shape, *, is_compiled):
    """A step on one batch of random tokens; returns its loss."""
    model = make_model(shape)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    size = shape.microbatch_size, shape.length
    tokens = torch.randint(shape.vocab_size, size, device=transformers_steps.DEVICE)
    called = torch.compile(model, dynamic=False) if is_compiled else model

    def step():
        loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--microbatch_size", type=int, default=SHAPE.microbatch_size)
    parser.add_argument("--is_compiled", type=int, default=1)
    given = parser.parse_args()
    shape = dataclasses.replace(SHAPE, microbatch_size=given.microbatch_size)
    transformers_steps.time_and_print(
        shape,
        lambda: make_step(shape, is_compiled=given.is_compiled),
        ("torch", "transformers", "peft"),
    )


if __name__ == "__main__":
    main()
