"""Experts of few rows: each expert that a row chose is read once."""

from zjax_kernels.decode.experts.api import choose_experts, few_rows_experts
from zjax_kernels.decode.experts.reference import Choice, lay_router

__all__ = ["Choice", "choose_experts", "few_rows_experts", "lay_router"]
