"""Primitives of JAX by property, so that a rule need not list them."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CALLS = _names("jit pjit closed_call custom_jvp_call custom_vjp_call remat2")
"""Do what their program does."""

ARITHMETIC = _names("add sub mul div max min pow select_n")
"""Scale, shift and choose entries of several operands."""

COMPARISONS = _names("eq ne lt le gt ge")
ROUNDINGS = _names("floor ceil round")

EXACT = (
    COMPARISONS
    | ROUNDINGS
    | _names("sin cos tan exp exp2 expm1 log log1p rem sign is_finite")
)
"""The last digits of their operands matter for their results."""

ELEMENTWISE = (
    ARITHMETIC
    | EXACT
    | _names(
        """abs add_any and cbrt clamp convert_element_type copy erf integer_pow logistic
        neg nextafter not one_minus_square or reduce_precision rsqrt sqrt square
        stop_gradient tanh"""
    )
)
"""Each entry of the result follows from the same entries of the operands."""

REDUCTIONS = _names("reduce_max reduce_min reduce_sum")

RESHAPES = _names("reshape squeeze transpose")
"""Keep all entries and order them otherwise."""

MOVES = RESHAPES | _names(
    "broadcast_in_dim concatenate dynamic_slice pad reshard rev slice split stack"
)
"""Return entries of their operands as they are."""

CHEAP = (
    ELEMENTWISE | REDUCTIONS | MOVES | _names("all_gather iota optimization_barrier")
)
"""Cost no more than to read their operands, or gather parameters."""
