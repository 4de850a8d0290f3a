"""A mixture of experts of zjax, both passes, timed layer by layer.

python examples/benchmarks/moe_ours.py [--only=PART_OF_A_NAME]
"""

import argparse
import functools

import call_timing
import jax
import jax.numpy as jnp
import moe_cases as cases

from zjax.moe.balance import balance_loss
from zjax.moe.experts import Experts, apply_experts
from zjax.moe.router import Router, route, router_logits


def make_router(layer):
    """Without a bound, or with the order in which DeepSpeed drops tokens."""
    drop = "position" if layer.top_k == 1 else "first_choices"
    return Router(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        drop="none" if layer.is_gated else drop,
    )


def make_arrays(layer):
    """Tokens, the router's matrix, the experts, and the cotangent of the output."""
    embed, mlp, num_experts = layer.embed_size, layer.mlp_size, layer.num_experts
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key, *shape, dtype=jnp.bfloat16, scale=1.0):
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    kernel = normal(keys[1], embed, num_experts, dtype=jnp.float32, scale=embed**-0.5)
    experts = Experts(
        up=normal(
            keys[2], num_experts, embed, mlp * (1 + layer.is_gated), scale=embed**-0.5
        ),
        down=normal(keys[3], num_experts, mlp, embed, scale=mlp**-0.5),
    )
    tokens = layer.num_tokens, embed
    return normal(keys[0], *tokens), kernel, experts, normal(keys[4], *tokens)


def make_call(layer):
    """Both passes, ready to be called; returns the output and all gradients."""
    router = make_router(layer)

    def apply(x, kernel, experts):
        routing = route(router_logits(x, kernel), router)
        activation = "swiglu" if layer.is_gated else "gelu"
        out = apply_experts(x, experts, routing, activation=activation)
        loss = 0.0 if layer.is_gated else balance_loss(routing, choices=1)
        return out, jnp.asarray(loss * cases.BALANCE_WEIGHT, jnp.float32)

    def run(x, kernel, experts, d_out):
        outputs, pull = jax.vjp(apply, x, kernel, experts)
        return outputs, pull((d_out, jnp.ones_like(outputs[1])))

    arrays = make_arrays(layer)
    return functools.partial(jax.jit(run).lower(*arrays).compile(), *arrays)


def main() -> None:
    layers, _ = cases.choose_layers(argparse.ArgumentParser())
    metrics = {}
    for layer in layers:
        ways = {"zjax": make_call(layer)}
        metrics |= cases.time_layer(layer, ways, jax.block_until_ready)
    call_timing.print_result(
        metrics, device=jax.devices()[0].device_kind, packages=("jax",)
    )


if __name__ == "__main__":
    main()
