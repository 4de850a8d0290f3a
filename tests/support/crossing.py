"""What a compiled program sends from one replica to another."""

import collections

from tests.support import models
from zjax.observe.collectives import list_collectives, mesh_axes

BYTES = {"u8": 1, "s8": 1, "u16": 2, "u32": 4, "f32": 4, "s32": 4, "pred": 1}
SCALARS = "scalars"
SCALARS_BYTES = 256
"""Most bytes of a message that holds losses and norms alone."""


def crossing(run, program="train", *arguments):
    """Collectives over `replica` of a program, of a batch or of other arguments."""
    if arguments:
        text = run.step.programs[program].lower(*arguments).compile().as_text()
    else:
        text = run.step.compile(models.make_batch(), program).as_text()
    return [
        each
        for each in list_collectives(text)
        if "replica" in mesh_axes(each.groups, run.mesh)
    ]


def is_large(collective):
    """Whether it sends more than losses and norms."""
    return collective.elements * BYTES[collective.dtype] > SCALARS_BYTES


def crossing_bytes(run, program, *arguments):
    """Bytes that a device sends by dtype, those of losses and norms by `SCALARS`."""
    sent = collections.Counter()
    for each in crossing(run, program, *arguments):
        kind = each.dtype if is_large(each) else SCALARS
        size = each.elements * BYTES[each.dtype] * each.times
        sent[kind] += size * (2 if each.op == "all-reduce" else 1)
    return sent
