"""Sets of JAX primitives with a common property."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CALLS = _names("jit pjit closed_call custom_jvp_call custom_vjp_call remat2")
"""Only run their inner program."""

ARITHMETIC = _names("add sub mul div max min pow select_n")
"""Combine or select entries of several operands."""

COMPARISONS = _names("eq ne lt le gt ge")
ROUNDINGS = _names("floor ceil round")

EXACT = (
    COMPARISONS
    | ROUNDINGS
    | _names("sin cos tan exp exp2 expm1 log log1p rem sign is_finite")
)
"""Their results depend on the last digits of their operands."""

ELEMENTWISE = (
    ARITHMETIC
    | EXACT
    | _names(
        """abs add_any and cbrt clamp convert_element_type copy erf integer_pow logistic
        neg nextafter not one_minus_square or reduce_precision rsqrt sqrt square
        stop_gradient tanh"""
    )
)
"""Each entry of the result depends on the same entry of each operand."""

REDUCTIONS = _names("reduce_max reduce_min reduce_sum")

RESHAPES = _names("reshape squeeze transpose")
"""Return all entries of the operand in another shape or order."""

MOVES = RESHAPES | _names(
    "broadcast_in_dim concatenate dynamic_slice pad reshard rev slice split stack"
)
"""Return entries of their operands unchanged."""

CHEAP = (
    ELEMENTWISE
    | REDUCTIONS
    | MOVES
    | _names("all_gather bitcast_convert_type iota optimization_barrier")
)
"""Cost no more than reading their operands, or gathering parameters."""
