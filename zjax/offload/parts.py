"""Parts of a program, compiled once for all that are alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zjax.jaxprs.program import Name, Program, text_of_constant

Jit = Callable[..., Any]
"""`jax.jit` with the options of the compiler."""
Known = Mapping[Name, Any]
"""Arrays of a program by name."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A compiled part of a program.

    Args:
        inputs: Names of what it reads.
        run: The compiled function.
        scalars: Its last operands, by which it differs from others that are alike.
    """

    inputs: list[Name]
    run: Callable[..., list[jax.Array]]
    scalars: tuple[Any, ...] = ()

    def __call__(self, known: Known) -> list[jax.Array]:
        """Runs the part.

        Args:
            known: Holds its inputs.

        Returns:
            Its outputs, in order.
        """
        return self.run(*(known[name] for name in self.inputs), *self.scalars)


def compile_parts(
    programs: Sequence[Program],
    jit: Jit,
    *,
    donated: frozenset[Name] = frozenset(),
    out_shardings: Sequence[Any] = (),
) -> list[Part]:
    """Compiles programs, those that differ in scalars alone once.

    Args:
        programs: Parts of one program.
        jit: Compiles.
        donated: Names whose arrays a part may use up.
        out_shardings: Of each program; None, or empty, leaves them to the compiler.

    Returns:
        One part for each.
    """
    forms = [program.normal_form() for program in programs]
    places = list(out_shardings) or [None] * len(programs)
    spent = [
        tuple(k for k, name in enumerate(program.inputs) if name in donated)
        for program in programs
    ]
    families: dict[Any, list[int]] = {}
    for i, (text, _) in enumerate(forms):
        families.setdefault((text, str(places[i]), spent[i]), []).append(i)
    parts: dict[int, Part] = {}
    for members in families.values():
        scalars = [forms[i][1] for i in members]
        rows = zip(*(map(text_of_constant, own) for own in scalars), strict=True)
        differing = [k for k, row in enumerate(rows) if len(set(row)) > 1]
        first = programs[members[0]]
        run = jit(
            first.lift(differing),
            donate_argnums=spent[members[0]],
            out_shardings=places[members[0]],
        )
        for i, own in zip(members, scalars, strict=True):
            values = tuple(np.asarray(own[k]) for k in differing)
            parts[i] = Part(programs[i].inputs, run, values)
    return [parts[i] for i in range(len(programs))]
