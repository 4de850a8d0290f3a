"""A Llama of random weights that torch decodes with a static cache.

python examples/benchmarks/decode_torch.py [--shape=7b] [--batches=1,16,64]
    [--attention=products,flex,sdpa]

Queries, keys and values are one product, and so are gate and up. What lies between two
products of queries, keys and values is compiled with `max-autotune-no-cudagraphs` and
tuned kernels, which leaves nothing to fuse across; then one CUDA graph holds all of a
token, with the choice of the next. The fastest attention counts.
"""

import argparse
import functools
import sys
import time
from typing import NamedTuple

import call_timing
import decode_cases as cases
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

DEVICE = "cuda"
MODE = "max-autotune-no-cudagraphs"
COPY_FLOATS = 2**28
WARM_UP_TOKENS = 5
BLOCK = 128
"""Keys of a block of FlexAttention."""


class Layer(NamedTuple):
    """Weights of a layer; what ends with `norm` is a vector, the others [out, in]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Weights(NamedTuple):
    table: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor

    def following(self):
        """Norm and product that follow each layer."""
        return [*(layer[:2] for layer in self.layers[1:]), (self.norm, self.head)]


def make_weights(shape):
    torch.manual_seed(0)
    width, head = shape.embed_size, shape.embed_size // shape.num_heads

    def matrix(*size):
        return torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * 0.02

    def vector():
        return torch.ones(width, device=DEVICE, dtype=torch.bfloat16)

    layers = [
        Layer(
            norm=vector(),
            qkv=matrix((shape.num_heads + 2 * shape.num_kv_heads) * head, width),
            out=matrix(width, width),
            mlp_norm=vector(),
            gate_up=matrix(2 * shape.mlp_size, width),
            down=matrix(width, shape.mlp_size),
        )
        for _ in range(shape.num_layers)
    ]
    table, last = matrix(shape.vocab_size, width), matrix(shape.vocab_size, width)
    return Weights(table, layers, vector(), last)


class State(NamedTuple):
    """What a token reads and changes, in place, so that a graph finds it again."""

    tokens: torch.Tensor
    position: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    angles: torch.Tensor
    """Of each position and pair of channels, float32[2, L, D / 2]: cosine, sine."""
    mask: BlockMask


def make_state(case):
    shape, length = case.shape, case.length
    head = shape.embed_size // shape.num_heads
    size = case.batch, shape.num_kv_heads, length, head

    def make_caches():
        make = functools.partial(torch.zeros, size, device=DEVICE, dtype=torch.bfloat16)
        return [make() for _ in range(shape.num_layers)]

    with torch.device(DEVICE):
        rates = 10_000.0 ** (-torch.arange(0, head, 2) / head)
        angles = torch.arange(length)[:, None] * rates
        angles = torch.stack([angles.cos(), angles.sin()])
        position = torch.zeros((), dtype=torch.int64)
        tokens = torch.zeros(case.batch, dtype=torch.int64)
        mask = make_block_mask(position, length)
    return State(tokens, position, make_caches(), make_caches(), angles, mask)


def make_block_mask(position, length):
    """Mask of all keys up to a position; `move_mask` follows the position."""
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    indices = torch.arange(-(-length // BLOCK), dtype=torch.int32)[None, None, None]
    return BlockMask.from_kv_blocks(
        one,
        indices.clone(),
        torch.zeros_like(one),
        indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: key <= position,
        seq_lengths=(1, length),
    )


def move_mask(mask, position):
    """All blocks before that of the position are full."""
    number = (position // BLOCK).to(torch.int32)
    mask.kv_indices[..., :1].copy_(number)
    mask.full_kv_num_blocks.copy_(number)


def rms_norm(x, weight):
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * scale).to(x.dtype) * weight


def rotate(x, angles):
    """Rotates pairs of channels of [..., T, D] by angles [2, T, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = angles
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat(turned, dim=-1).to(x.dtype)


def split_heads(shape, qkv, angles):
    """Rotated queries and keys, and values, [B, heads, T, D], of [B, T, channels]."""
    head = shape.embed_size // shape.num_heads
    counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    parts = qkv.unflatten(-1, (-1, head)).transpose(1, 2).split(counts, dim=1)
    return rotate(parts[0], angles), rotate(parts[1], angles), parts[2]


def finish_layer(x, attended, layer):
    """Adds to the stream what a layer computes of the outputs of attention."""
    x = x + F.linear(attended, layer.out)
    gate, up = F.linear(rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def attend_by_products(q, keys, values, position, mask):
    """Two products and a softmax, for the compiler to make kernels of."""
    batch, heads, length, head = keys.shape
    scores = q.view(batch, heads, -1, head) @ keys.mT
    hidden = torch.arange(length, device=keys.device) > position
    scores = (scores.float() * head**-0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1).to(values.dtype) @ values).view(q.shape)


def attend_by_flex(q, keys, values, position, mask):
    """FlexAttention, which reads blocks with live keys alone."""
    is_grouped = q.shape[1] != keys.shape[1]
    return flex_attention(q, keys, values, block_mask=mask, enable_gqa=is_grouped)


def attend_by_sdpa(q, keys, values, position, mask):
    """The kernel that torch chooses for a mask."""
    seen = torch.arange(keys.shape[2], device=keys.device)[None] <= position
    is_grouped = q.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=seen, enable_gqa=is_grouped
    )


ATTENTION = {
    "products": attend_by_products,
    "flex": attend_by_flex,
    "sdpa": attend_by_sdpa,
}


def make_step(shape, weights, state, attend):
    """A function that reads a token of each row, and puts the next in its place."""

    def begin(tokens, table, norm, qkv, position, mask):
        move_mask(mask, position)
        x = table[tokens]
        return x, F.linear(rms_norm(x, norm), qkv)

    def run(x, qkv, keys, values, angles, position, mask, layer, norm, product):
        where = position.view(1)
        q, k, v = split_heads(shape, qkv[:, None], angles[:, where])
        keys[:, :, where], values[:, :, where] = k, v
        attended = attend(q, keys, values, position, mask).flatten(1)
        x = finish_layer(x, attended, layer)
        return x, F.linear(rms_norm(x, norm), product)

    def end(*given):
        return run(*given)[1].argmax(-1)

    compiled = functools.partial(
        torch.compile, fullgraph=True, dynamic=False, mode=MODE
    )
    begin_, run_, end_ = map(compiled, (begin, run, end))
    tokens, position, all_keys, all_values, angles, mask = state
    caches = zip(all_keys, all_values, strict=True)
    *inner, last = zip(caches, weights.layers, weights.following(), strict=True)

    def step():
        x, qkv = begin_(tokens, weights.table, *weights.layers[0][:2], position, mask)
        for cache, layer, following in inner:
            x, qkv = run_(x, qkv, *cache, angles, position, mask, layer, *following)
        cache, layer, following = last
        new = end_(x, qkv, *cache, angles, position, mask, layer, *following)
        tokens.copy_(new)
        position.add_(1)

    return step


def read_prompts(case, weights, state):
    """Fills the cache, one row after another; the next token of each row."""
    shape, num_given = case.shape, case.num_given
    angles = state.angles[:, :num_given]
    for row, prompt in enumerate(case.prompts()):
        x = weights.table[torch.tensor(prompt, device=DEVICE)][None]
        for number, layer in enumerate(weights.layers):
            qkv = F.linear(rms_norm(x, layer.norm), layer.qkv)
            q, k, v = split_heads(shape, qkv, angles)
            state.keys[number][row, :, :num_given] = k[0]
            state.values[number][row, :, :num_given] = v[0]
            is_grouped = shape.num_kv_heads != shape.num_heads
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=is_grouped
            )
            attended = attended.transpose(1, 2).flatten(2)
            x = finish_layer(x, attended, layer)
        logits = F.linear(rms_norm(x[0, -1:], weights.norm), weights.head)
        state.tokens[row] = logits[0].argmax()


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def capture(step):
    """Compiles a step, and puts all of it into one CUDA graph."""
    if DEVICE != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_TOKENS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def time_sweeps(case, state, first, attend, weights, num_sweeps):
    """Seconds per token of several sweeps, after one that is not timed."""
    torch.compiler.reset()
    state.position.fill_(case.num_given)
    replay = capture(make_step(case.shape, weights, state, attend))
    seconds = []
    for _ in range(num_sweeps + 1):
        state.position.fill_(case.num_given)
        state.tokens.copy_(first)
        synchronize()
        start = time.perf_counter()
        for _ in range(case.num_tokens):
            replay()
        synchronize()
        seconds.append((time.perf_counter() - start) / case.num_tokens)
    return seconds[1:]


def time_case(case, weights, given):
    """Metrics of a case by the fastest attention that runs."""
    state, found = make_state(case), {}
    read_prompts(case, weights, state)
    first = state.tokens.clone()
    for name in given.attention.split(","):
        label, start = case.metric(name), time.perf_counter()
        try:
            timed = time_sweeps(
                case, state, first, ATTENTION[name], weights, given.num_sweeps
            )
        except Exception as error:  # each package of the compiler has its own
            print(f"{label}: {str(error)[:300]}", file=sys.stderr, flush=True)
            continue
        found[name] = timed
        spent = time.perf_counter() - start
        call_timing.note(f"{label} ({spent:.0f} s with compilation)", timed)
    if not found:
        raise SystemExit(f"batch {case.batch}: no attention runs")
    best = min(found, key=lambda name: sorted(found[name])[len(found[name]) // 2])
    return case.describe(found[best]) | {case.metric("attention"): best}


def copy_rates(num_floats):
    """Bytes per second of a copy of the device's memory."""
    numbers = torch.ones(num_floats, device=DEVICE)
    copied = torch.empty_like(numbers)
    seconds = call_timing.time_calls(
        lambda: torch.neg(numbers, out=copied), lambda _: synchronize(), min_calls=10
    )
    return call_timing.rates(2 * numbers.nbytes, seconds)


def main() -> None:
    parser: argparse.ArgumentParser = cases.make_parser()
    parser.add_argument("--attention", default=",".join(ATTENTION))
    given = parser.parse_args()
    inductor.coordinate_descent_tuning = True
    metrics = {"copy_bytes_per_second": copy_rates(COPY_FLOATS)}
    chosen = cases.make_cases(given)
    with torch.no_grad():
        weights = make_weights(chosen[0].shape)
        for case in chosen:
            metrics |= time_case(case, weights, given)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    call_timing.print_result(metrics, device=device, packages=("torch",))


if __name__ == "__main__":
    main()
