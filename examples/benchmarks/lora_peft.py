"""LoRA on Llama 3 8B by peft and transformers, whole steps on one device.

python examples/benchmarks/lora_peft.py [--microbatch_size=1] [--compiled=blocks]

Random weights in bfloat16, adapters of rank 16 on all linear layers of blocks,
checkpoints at each layer. Compiled is the model whole, each block and the loss, or
nothing.
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
COMPILED = ("model", "blocks", "nothing")


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


def compile_parts(model, compiled):
    """The model to call; all blocks share one compiled program."""
    if compiled == "model":
        return torch.compile(model, dynamic=False)
    if compiled == "blocks":
        inner = model.get_base_model()
        for block in inner.model.layers:
            block.forward = torch.compile(block.forward, dynamic=False)
        inner.loss_function = torch.compile(inner.loss_function, dynamic=False)
    return model


def make_step(shape, *, compiled):
    """A step on one batch of random tokens; returns its loss."""
    model = make_model(shape)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    size = shape.microbatch_size, shape.length
    tokens = torch.randint(shape.vocab_size, size, device=transformers_steps.DEVICE)
    called = compile_parts(model, compiled)

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
    parser.add_argument("--compiled", choices=COMPILED, default="blocks")
    given = parser.parse_args()
    shape = dataclasses.replace(SHAPE, microbatch_size=given.microbatch_size)
    transformers_steps.time_and_print(
        shape,
        lambda: make_step(shape, compiled=given.compiled),
        ("torch", "transformers", "peft"),
    )


if __name__ == "__main__":
    main()
