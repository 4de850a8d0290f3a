"""Programs of which parts are taken and run."""

import jax.numpy as jnp

from zjax.jaxprs.program import text_of_constant, trace


def test_part_stops_at_what_is_known():
    program, _ = trace(lambda x: jnp.exp(jnp.sin(x)), 1.0)
    middle = program.equations[0].outvars[0]
    part = program.part([middle], program.outputs)
    assert part.inputs == [middle]
    assert float(part(0.0)[0]) == 1.0


def test_programs_that_differ_in_scalars_have_one_form():
    programs = [trace(lambda x, k=k: x * k + 1, 2.0)[0] for k in (3.0, 4.0)]
    (text, first), (other, second) = [each.normal_form() for each in programs]
    assert text == other
    differing = [
        i
        for i, (x, y) in enumerate(zip(first, second, strict=True))
        if text_of_constant(x) != text_of_constant(y)
    ]
    lifted = programs[0].lift(differing)
    assert float(lifted(2.0, 4.0)[0]) == 9.0


def test_programs_that_differ_otherwise_have_two():
    forms = [trace(f, 2.0)[0].normal_form()[0] for f in (jnp.sin, jnp.cos)]
    assert forms[0] != forms[1]
