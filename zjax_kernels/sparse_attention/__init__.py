"""Block-sparse attention: layouts, plans, and the kernels that run them."""

from zjax_kernels.sparse_attention.api import sparse_attention
from zjax_kernels.sparse_attention.layout import BlockLayout, Pattern
from zjax_kernels.sparse_attention.patterns import Dense, Fixed, Variable
from zjax_kernels.sparse_attention.picture import draw_layout, plot_layout
from zjax_kernels.sparse_attention.plan import Plan, make_plan
from zjax_kernels.sparse_attention.sequence import (
    SequencePlan,
    make_sequence_plan,
    sequence_attention,
)
from zjax_kernels.sparse_attention.sliding_patterns import (
    BigBird,
    BSLongformer,
    LocalSlidingWindow,
)
from zjax_kernels.sparse_attention.sparsity_config import SparsityConfig
from zjax_kernels.sparse_attention.tuning import tune

__all__ = [
    "BSLongformer",
    "BigBird",
    "BlockLayout",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Pattern",
    "Plan",
    "SequencePlan",
    "SparsityConfig",
    "Variable",
    "draw_layout",
    "make_plan",
    "make_sequence_plan",
    "plot_layout",
    "sequence_attention",
    "sparse_attention",
    "tune",
]
