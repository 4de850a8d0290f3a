"""One tiny language model, and for every feature the settings that turn it on.

All features of a model share the losses and weights of one device, compiled once.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from tests.support.first_state import first_state
from tests.support.trees import stacked, unpadded
from zjax.config import check_config, load_config
from zjax.models.build import make_model
from zjax.observe import CompileReport
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run

ROWS, STEPS = 16, 3
SETTINGS = {
    "global_batch_size": ROWS,
    "num_steps": 10,
    "num_microbatches": 1,
    "zero": {"stage": 0, "min_shard_elements": 0},
    "precision": {"compute_dtype": "float32"},
    "optimizer": {
        "rule": "sgd",
        "schedule": {"kind": "constant", "num_warmup_steps": 0},
        "peak_learning_rate": 0.5,
        "clip_norm": float("inf"),
    },
    "model": {
        "num_layers": 3,
        "embed_size": 16,
        "mlp_size": 24,
        "num_heads": 4,
        "vocab_size": 41,
        "max_length": 16,
        "remat": "none",
    },
    "data": {"length": 8, "source": "synthetic"},
}
LLAMA = (
    "model.norm=rms_norm model.positions=rotary model.activation=swiglu "
    "model.use_bias=False model.tied_head=False model.num_kv_heads=2 "
)
PADDED = LLAMA + (
    "model.num_heads=6 model.head_size=6 model.use_bias=True model.query_key_norm=True "
)
DROPOUT = "model.dropout_rate=0.1 model.attention_dropout_rate=0.3 num_microbatches=2 "
LORA = "lora.rank=2 lora.alpha=8 lora.also_train=('norm',) "
DORA = LORA + "lora.form=dora "
EXPERTS = "model.moe=token_choice model.moe.num_experts=4 model.moe.top_k=2 "
MODELS = {
    "gpt": "",
    "four layers": "model.num_layers=4 ",
    "llama": LLAMA,
    "four llama layers": LLAMA + "model.num_layers=4 ",
    "one kv head": LLAMA + "model.num_kv_heads=1 ",
    "bert": "model.kind=encoder ",
    "padded, dropped": PADDED + DROPOUT,
    "latents": LLAMA
    + "model.num_heads=6 model.num_kv_heads=6 model.positions.size=4 "
    + "model.latent.key_rank=5 model.latent.query_rank=7 "
    + "model.latent.plain_size=3 model.latent.value_size=6 ",
    "dropped": LLAMA + DROPOUT,
    "adapted": LLAMA + DORA,
    "padded, adapted": PADDED + DORA,
    "two adapted layers": LLAMA + LORA + "model.num_layers=2 ",
    "two dropped adapters": LLAMA
    + LORA
    + "lora.targets=('query','up') lora.dropout=0.25 model.num_layers=2 "
    + "num_microbatches=2 ",
    "sparse": LLAMA
    + "model.attention=sparse model.attention.pattern=bigbird "
    + "model.attention.block=128 data.length=512 model.max_length=512 "
    + "model.num_layers=1 ",
    "float8": "precision.matmul_dtype=float8 model.embed_size=32 model.mlp_size=64 ",
    "experts": EXPERTS + "model.num_layers=2 model.moe.balance_loss=0 ",
    "shared experts": LLAMA
    + EXPERTS
    + "model.moe.every=2 model.moe.first_dense=1 model.moe.num_shared=1 "
    + "model.moe.expert_size=8 model.moe.balance_loss=0 model.moe.bias_rate=0.01 ",
    "chunked": "model.loss_chunk_tokens=32 model.z_loss=0.001 ",
    "clipped": "optimizer.clip_norm=0.05 optimizer.ema_decay=0.5 ",
    "frozen": "optimizer.groups=({'pattern':'^embedding','learning_rate_scale':0.0},"
    "{'pattern':'query/kernel$','learning_rate_scale':3.0}) ",
    "frozen blocks": "optimizer.groups=({'pattern':'^blocks',"
    "'learning_rate_scale':0.0},) ",
    "adafactor": LLAMA + "optimizer.rule=adafactor optimizer.peak_learning_rate=0.01 ",
    "layerwise": "model.num_layers=4 random_ltd=layerwise random_ltd.pacing.start=4 "
    "random_ltd.pacing.multiple=4 ",
    "span": "model.num_layers=4 random_ltd=span random_ltd.pacing.start=4 "
    "random_ltd.pacing.multiple=4 num_microbatches=2 ",
}
"""Settings of which results depend."""

HOST = (
    "zero.offload=pinned_host zero.offload.parameter_memory=pinned_host "
    "model.remat=full "
)
APART = "pipeline=zb_h1 "
TWO, FOUR = "num_microbatches=2 ", "num_microbatches=4 "
FEATURES = {
    "stage 3, tensor, a loop": (
        "gpt",
        "mesh.tensor=2 zero.stage=3 model.layers_per_scan=1 model.remat=elementwise "
        + TWO,
    ),
    "float8": ("float8", "mesh.tensor=2 zero.stage=3 " + TWO),
    "kv heads copied": ("llama", "mesh.tensor=4 zero.stage=2 " + TWO),
    "heads that do not divide": ("padded, dropped", "mesh.tensor=4 zero.stage=1"),
    "latents, heads that do not divide": ("latents", "mesh.tensor=4 zero.stage=2"),
    "adapters of padded heads": (
        "padded, adapted",
        "mesh.tensor=4 zero.stage=2",
    ),
    "ulysses": ("llama", "mesh.sequence=4 zero.stage=3"),
    "ring, tensor": (
        "llama",
        "mesh.sequence=2 mesh.tensor=2 zero.stage=2 model.sequence_attention=ring "
        + TWO,
    ),
    "encoder, ulysses": ("bert", "mesh.sequence=2 mesh.data=2 zero.stage=3"),
    "halo of sparse attention": (
        "sparse",
        "mesh.sequence=2 mesh.tensor=2 zero.stage=3 model.sequence_attention=halo "
        "model.remat=full " + TWO,
    ),
    "dropout on replicas": (
        "dropped",
        "mesh.replica=2 mesh.tensor=2 mesh.sequence=2 zero.stage=3 "
        "model.sequence_attention=ulysses",
    ),
    "pipeline, layers and vocabulary that do not divide": (
        "gpt",
        "mesh.pipeline=2 zero.stage=1 model.remat=full " + FOUR,
    ),
    "pipeline, interleaved, ring": (
        "four llama layers",
        "mesh.pipeline=2 mesh.sequence=2 zero.stage=3 pipeline=interleaved "
        "pipeline.recompute=False model.sequence_attention=ring " + FOUR,
    ),
    "pipeline, few microbatches": (
        "gpt",
        "mesh.pipeline=3 mesh.tensor=2 mesh.data=1 zero.stage=3 " + TWO,
    ),
    "pipeline, clipped": (
        "clipped",
        "mesh.pipeline=2 mesh.data=2 zero.stage=2 pipeline=gpipe "
        "pipeline.recompute=False " + FOUR,
    ),
    "pipeline in bfloat16": (
        "gpt",
        "mesh.pipeline=2 mesh.data=1 pipeline.recompute=False "
        "precision.compute_dtype=bfloat16 " + TWO,
    ),
    "pipeline, adapters, dropout": (
        "two dropped adapters",
        "mesh.pipeline=2 mesh.data=2",
    ),
    "pipeline, adapters, weights apart": (
        "two adapted layers",
        "mesh.pipeline=2 mesh.data=2 zero.stage=2 " + APART + TWO,
    ),
    "pipeline, nothing to train in a stage": (
        "frozen blocks",
        "mesh.pipeline=2 mesh.data=2 " + TWO,
    ),
    "adapters, sequence": ("adapted", "mesh.sequence=2 zero.stage=3 " + TWO),
    "experts, tensor": ("experts", "mesh.expert=4 mesh.tensor=2 zero.stage=3"),
    "experts, sequence": (
        "shared experts",
        "mesh.expert=2 mesh.sequence=2 zero.stage=2",
    ),
    "experts, pipeline": (
        "experts",
        "mesh.pipeline=2 mesh.expert=2 mesh.data=1 pipeline.recompute=False " + TWO,
    ),
    "tokens of a span, tensor, a loop": (
        "span",
        "mesh.tensor=2 model.layers_per_scan=1 model.remat=full",
    ),
    "host": (
        "llama",
        HOST
        + "zero.offload.gradient_memory=pinned_host zero.stage=3 model.remat=none "
        + TWO,
    ),
    "host, under the backward pass": (
        "gpt",
        HOST + "zero.stage=2 precision.on_nonfinite=update "
        "model.activation_memory=pinned_host",
    ),
    "host, clipped": (
        "clipped",
        "zero.offload=pinned_host zero.stage=1 model.remat=full " + TWO,
    ),
    "host, frozen": (
        "frozen",
        "zero.offload=pinned_host model.remat=dots",
    ),
    "host, adafactor": (
        "adafactor",
        "zero.offload=pinned_host zero.stage=2 model.remat=attention_and_mlp",
    ),
    "host, residuals on the device, dropout": (
        "dropped",
        "zero.offload=pinned_host zero.stage=2 model.remat=elementwise",
    ),
    "host, experts": (
        "shared experts",
        HOST + "mesh.expert=2 mesh.tensor=2 zero.stage=2",
    ),
    "host, adapters": (
        "adapted",
        HOST + "zero.offload.gradient_memory=pinned_host zero.stage=3 " + TWO,
    ),
    "host, adapters, dropout, residuals on the device": (
        "two dropped adapters",
        "zero.offload=pinned_host zero.stage=2 model.remat=attention",
    ),
    "host, some tokens": ("layerwise", HOST + "zero.stage=3 mesh.data=2"),
    "host, tokens of a span": ("span", HOST + "zero.stage=2 mesh.data=2"),
    "disks": (
        "llama",
        "zero.offload=nvme zero.offload.parameter_memory=nvme "
        "zero.offload.gradient_memory=nvme model.activation_memory=nvme "
        "model.remat=full zero.stage=3 mesh.data=2 precision.on_nonfinite=update "
        + TWO,
    ),
}
"""Model, and settings that must not change results: `mesh.data` fills eight devices."""
PAIRS = {
    "tensor, one kv head": ("one kv head", "mesh.tensor=2 zero.stage=2"),
    "tensor, chunks of logits": ("chunked", "mesh.tensor=4 zero.stage=1"),
    "tensor, chunks of tokens": (
        "gpt",
        "mesh.tensor=4 zero.stage=3 model.mlp_chunk_tokens=4 model.remat=full",
    ),
    "tensor, host": ("padded, dropped", "mesh.tensor=4 zero.stage=2 " + HOST),
    "ulysses, pipeline": (
        "llama",
        "mesh.pipeline=2 mesh.sequence=2 mesh.tensor=2 zero.stage=3 "
        "model.sequence_attention=ulysses " + APART + FOUR,
    ),
    "ring, host": (
        "llama",
        HOST + "mesh.sequence=4 zero.stage=3 model.sequence_attention=ring",
    ),
    "dropout, pipeline, sequence": (
        "dropped",
        "mesh.pipeline=2 mesh.sequence=2 " + APART,
    ),
}
"""More of them, of which each is held above with another one: they run by hand."""


class Trained(NamedTuple):
    """Losses and norms of steps, and the weights after them in logical shapes."""

    losses: np.ndarray
    norms: np.ndarray
    weights: dict


def config_of(settings, *overrides):
    return load_config(SETTINGS, *settings.split(), *overrides)


def num_devices(config):
    """Devices of a mesh that is given whole, or else eight."""
    mesh = config.mesh
    if mesh.data == -1:
        return 8
    sizes = (mesh.pipeline, mesh.replica, mesh.data, mesh.expert)
    return int(np.prod([*sizes, mesh.sequence, mesh.tensor]))


def start(config, number=8, change=lambda model: model, *, is_drawn=False):
    """A run on some devices, of a model that a test may change."""
    check_config(config, number)
    model = change(make_model(config))
    tx, devices = make_optimizer(config, model), jax.devices()[:number]
    restore = None if is_drawn else first_state(config, model)
    return make_run(config, model, tx, devices=devices, restore=restore)


def make_batch(config, step):
    """Packed documents with padding and tokens of unequal weight, or padded rows."""
    rng, length = np.random.default_rng(step), config.data.length
    tokens = rng.integers(0, config.model.vocab_size, (ROWS, length + 1), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.float32(rng.integers(1, 4, (ROWS, length)) / 2),
    }
    if config.model.kind == "encoder":
        return batch | {"lengths": rng.integers(1, length + 1, ROWS, np.int32)}
    documents = np.sort(rng.integers(1, 4, (ROWS, length), np.int32), 1)
    documents[: ROWS // 2, length // 3 :] = 0
    return batch | {"segment_ids": documents}


def train(run):
    """The state after some steps, and what they computed."""
    state, found = run.state, []
    with CompileReport() as report:
        for step in range(STEPS):
            batch = make_batch(run.config, step)
            with report.watch(step, batch) as compiled:
                state, metrics = run.step(state, batch)
            found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    assert not compiled.line, compiled.line
    losses, norms = np.array(found).T
    return state, Trained(losses, norms, weights_of(run, state))


def weights_of(run, state):
    return stacked(unpadded(state.master, run.plan.master))


@functools.cache
def on_one_device(model):
    """Steps of one device, in a loop over layers where there is one kind of them."""
    settings = MODELS[model]
    if "moe" not in settings and "num_layers=1" not in settings:
        settings += "model.layers_per_scan=1 "
    return train(start(config_of(settings), 1))[1]
