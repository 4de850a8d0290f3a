"""Compiled parts of a traced program, and the memory that each part needs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zjax.jaxprs.program import Name, Program, text_of_constant
from zjax.sharding.activations import batch_shardings
from zjax.sharding.plan import Plan
from zjax.typing import Entries

Jit = Callable[..., Any]
"""`jax.jit` with compiler options."""


@dataclasses.dataclass(frozen=True)
class CompiledGroup:
    """The compiled program of one group of arrays.

    Args:
        inputs: Names of the operands.
        run: Jitted function, which several groups may share.
        scalars: Last operands: the constants in which groups that share `run` differ.
    """

    inputs: list[Name]
    run: Callable[..., list[jax.Array]]
    scalars: tuple[Any, ...] = ()

    def __call__(self, arrays: Mapping[Name, Any]) -> list[jax.Array]:
        """Runs the program on the operands among `arrays`."""
        return self.run(*(arrays[name] for name in self.inputs), *self.scalars)


def compile_groups(
    programs: Sequence[Program],
    jit: Jit,
    *,
    donated: frozenset[Name] = frozenset(),
    out_shardings: Sequence[Any] = (),
) -> list[CompiledGroup]:
    """Jits programs, once for all programs that differ in scalars alone.

    `donated` names operands to donate. `out_shardings` has one entry per program; None,
    or an empty sequence, leaves shardings to the compiler.
    """
    forms = [program.normal_form() for program in programs]
    places = list(out_shardings) or [None] * len(programs)
    donations = [
        tuple(k for k, name in enumerate(program.inputs) if name in donated)
        for program in programs
    ]
    # Layers differ in constants at most: one compilation serves every layer.
    families: dict[Any, list[int]] = {}
    for i, (text, _) in enumerate(forms):
        families.setdefault((text, str(places[i]), donations[i]), []).append(i)
    compiled: dict[int, CompiledGroup] = {}
    for members in families.values():
        first, scalars = members[0], [forms[i][1] for i in members]
        # Literals may be arrays, which compare by text.
        texts = zip(
            *(map(text_of_constant, literals) for literals in scalars), strict=True
        )
        differing = [k for k, column in enumerate(texts) if len(set(column)) > 1]
        run = jit(
            programs[first].lift(differing),
            donate_argnums=donations[first],
            out_shardings=places[first],
        )
        for i, literals in zip(members, scalars, strict=True):
            values = tuple(np.asarray(literals[k]) for k in differing)
            compiled[i] = CompiledGroup(programs[i].inputs, run, values)
    return [compiled[i] for i in range(len(programs))]


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes on one device at one moment of a step.

    Args:
        moment: Name of the program that runs.
        parts: Bytes by kind of use, such as residuals or gradients.
    """

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


class UnreportedMemoryError(Exception):
    """The compiler does not report the memory of a program."""


def added_bytes(program: Any, *operands: Any) -> int:
    """Counts the bytes that a jitted function adds to the operands, once compiled."""
    return added_by(program.lower(*operands).compile())


def added_by(compiled: jax.stages.Compiled) -> int:
    """Counts the bytes that a compiled program adds to the operands."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise UnreportedMemoryError
    # Aliased results live in donated operands, which are counted already.
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return results + analysis.temp_size_in_bytes


def like_batch(plan: Plan, tree: Any, entries: Entries | None = None) -> Any:
    """Returns shapes with the shardings of a batch, or of a stream of activations."""
    return placed(tree, batch_shardings(plan, tree, entries or {}))


def placed(shapes: Any, places: Any) -> Any:
    """Returns shapes with the shardings `places`."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        places,
    )
