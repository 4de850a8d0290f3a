"""Reinforcement learning on one device: sampler against trainer, GRPO against TRL.

python examples/benchmarks/contest.py examples/benchmarks/reinforcement.py
    --rows=grpo_step --only="TRL"
"""

import dataclasses
from typing import Literal

from contestants import on_one_device
from contests import Case, Contest, Row

PROGRAMS = {"JAX_COMPILATION_CACHE_DIR": "/tmp/zjax_rl_programs"}
"""Two of the runs draw texts by the same programs, which compile once."""
ONE_ROLLOUT = "--num_prompts=32", "--num_warm_ups=0", "--num_steps=1"
"""The most rows at once, and microbatches as of more texts: the same peak."""


def ours(
    name, script, *words, kind: Literal["zjax", "peer"] = "zjax", timeout_seconds=300
):
    """A program of zjax, with the programs that earlier ones have compiled."""
    made = on_one_device(name, kind, script, *words, timeout_seconds=timeout_seconds)
    return dataclasses.replace(made, environment={**made.environment, **PROGRAMS})


GRPO = ours("zjax GRPO", "rl_ours")
PLAIN = ours("zjax GRPO at temperature 1", "rl_ours", "--temperature=1", *ONE_ROLLOUT)
EXACT = ours("zjax GRPO in exact mode", "rl_ours", "--exact", timeout_seconds=590)
REFERENCE = ours("zjax GRPO with reference", "rl_ours", "--reference", *ONE_ROLLOUT)
SUPERVISED = ours(
    "zjax supervised", "rl_ours", "--supervised", *ONE_ROLLOUT, kind="peer"
)
REPLAY = ours("zjax with replay", "rl_replay_ours", "--ways=replay")
ROUTERS = ours("zjax without replay", "rl_replay_ours", "--ways=routers", kind="peer")
FEW = "--num_prompts=16"
"""A step of TRL on 64 prompts takes 196 s."""
FEW_GRPO = ours("zjax GRPO of 16 prompts", "rl_ours", FEW)
TRL = on_one_device("TRL", "peer", "rl_trl", FEW, timeout_seconds=590)
CONTESTANTS = GRPO, PLAIN, EXACT, REFERENCE, SUPERVISED, REPLAY, ROUTERS, FEW_GRPO, TRL
COMPARED = (
    "all tokens of a rollout; the sampler's probabilities are of the pass that drew "
    "the token, the trainer's of the passes of the update; the divergence is the mean "
    "of k3"
)


def notes(num_prompts, temperature=0.25):
    """What a step is."""
    return (
        "a Llama of the shape of Qwen2.5-1.5B with random weights, computed in "
        f"bfloat16; {num_prompts} prompts of 128 random tokens, 8 texts of each with "
        f"512 tokens at temperature {temperature}, one update on them; rewards cost no "
        "time"
    )


def get_contest():
    return Contest("Reinforcement learning", CONTESTANTS, (*gap(), replay(), *costs()))


def divergence(contestant):
    """Divergence of the trainer's probabilities of tokens from the sampler's."""
    return Case(
        ours=(contestant.name,),
        peer=1,
        metric="sampler_kl",
        unit="nats per token",
        must=1e-3,
        aim=3e-4,
        name="divergence",
        peer_name="1 nat per token",
    )


def gap():
    """How far sampler and trainer are apart, and what it costs that they are not."""
    exact = Case(
        ours=(EXACT.name,),
        peer=1,
        metric="largest_ratio",
        unit="of the two probabilities",
        must=1,
        aim=1,
        name="exact mode, largest ratio of a token",
        peer_name="equal bits",
    )
    seconds = Case(
        ours=(EXACT.name,),
        peer=(GRPO.name,),
        metric="step_seconds",
        unit="seconds",
        must=1.5,
        aim=1.2,
        name="exact mode, step over as is",
    )
    yield Row(
        "rl_gap",
        "The trainer finds the probabilities by which the sampler drew the tokens.",
        (divergence(GRPO), exact, seconds),
        headline="GRPO of 1.5B: sampler to trainer, exact mode",
        higher_is_better=False,
        notes=f"{notes(64)}; {COMPARED}",
        by_devices=False,
    )
    yield Row(
        "rl_gap_plain",
        "At temperature 1 the trainer finds nearly the sampler's probabilities.",
        (divergence(PLAIN),),
        higher_is_better=False,
        notes=f"{notes(32, 1)}; {COMPARED}",
        by_devices=False,
    )


def replay():
    """How far they are apart where a router may choose other experts."""
    case = Case(
        ours=(REPLAY.name,),
        peer=(ROUTERS.name,),
        metric="sampler_kl",
        unit="nats per token",
        must=0.5,
        aim=0.1,
    )
    return Row(
        "rl_replay",
        "The trainer is nearer to the sampler with the experts that the sampler chose.",
        (case,),
        higher_is_better=False,
        notes="8 layers of width 1,024, 4 of 32 experts, random weights that do not "
        "change, computed in bfloat16; 512 texts of 512 tokens",
        by_devices=False,
    )


def costs():
    """Time and memory of a step."""
    step = Case(
        ours=(FEW_GRPO.name,),
        peer=(TRL.name,),
        metric="texts_per_second",
        unit="texts/s",
        must=3,
        aim=6,
    )
    memory = Case(
        ours=(REFERENCE.name,),
        peer=(SUPERVISED.name,),
        metric="peak_bytes",
        unit="bytes",
        must=1.25,
        aim=1.1,
    )
    yield Row(
        "grpo_step",
        "Steps of GRPO are faster than TRL's.",
        (step,),
        headline="GRPO of 1.5B: texts drawn and learned per second over TRL's",
        notes=notes(16),
        by_devices=False,
    )
    yield Row(
        "rl_memory",
        "GRPO with a reference needs little more memory than supervised training.",
        (memory,),
        theme="memory",
        headline="GRPO of 1.5B with a reference: device memory over supervised",
        higher_is_better=False,
        notes="microbatches of 32 rows of 640 tokens, the same optimizer and "
        "recomputation; GRPO draws 256 texts at once",
        by_devices=False,
    )
