"""Bytes of the state on a device, over the closed form of the ZeRO paper."""

from contestants import zjax

from zjax.bench import Case, Contest, Row

STAGES = (0, 1, 2, 3)


def get_contest():
    contestants = tuple(
        zjax(f"zjax stage {stage}", "configs/gpt2_124m.py", f"zero.stage={stage}")
        for stage in STAGES
    )
    cases = tuple(
        Case(
            ours=(contestant.name,),
            peer=(contestant.name,),
            metric="state_bytes",
            unit="bytes",
            must=1.05,
            aim=1.01,
            name=f"stage {stage}",
            peer_metric="closed_form_bytes",
            peer_name="closed form",
        )
        for stage, contestant in zip(STAGES, contestants, strict=True)
    )
    row = Row(
        "zero_memory",
        "The state on a device takes the bytes of the closed form, K Psi / N.",
        cases,
        higher_is_better=False,
        notes="K = 12: master weights and both moments; gradients and parameters in "
        "use live only within a step",
    )
    return Contest("GPT-2 124M by ZeRO stage", contestants, (row,))
