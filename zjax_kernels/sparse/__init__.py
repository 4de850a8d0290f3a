"""Block-sparse attention: layouts, plans and kernels."""

from zjax_kernels.sparse.api import sparse_attention, sparse_attention_gradients
from zjax_kernels.sparse.layout import BlockLayout, Pattern
from zjax_kernels.sparse.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)
from zjax_kernels.sparse.picture import draw_layout, plot_layout
from zjax_kernels.sparse.plan import Plan, make_plan
from zjax_kernels.sparse.search import tune
from zjax_kernels.sparse.selection import limit_window, make_selected_plan
from zjax_kernels.sparse.sequence import (
    SequencePlan,
    make_sequence_plan,
    sequence_attention,
)
from zjax_kernels.sparse.sparsity_config import Custom, SparsityConfig

__all__ = [
    "BSLongformer",
    "BigBird",
    "BlockLayout",
    "Custom",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Pattern",
    "Plan",
    "SequencePlan",
    "SparsityConfig",
    "Variable",
    "draw_layout",
    "limit_window",
    "make_plan",
    "make_selected_plan",
    "make_sequence_plan",
    "plot_layout",
    "sequence_attention",
    "sparse_attention",
    "sparse_attention_gradients",
    "tune",
]
