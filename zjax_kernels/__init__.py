"""GPU kernels for JAX that depend on JAX alone.

Example:
    >>> import jax.numpy as jnp
    >>> import zjax_kernels
    >>> layout = zjax_kernels.BigBird(num_heads=4, block=64).layout(1024)
    >>> plan = zjax_kernels.make_plan(layout)
    >>> x = jnp.ones((1, 1024, 4, 64))
    >>> zjax_kernels.sparse_attention(x, x, x, plan).shape
    (1, 1024, 4, 64)
"""

from zjax_kernels.decode import (
    Choice,
    choose_experts,
    few_rows_experts,
    few_rows_matmul,
    find_best,
    lay_router,
    paged_attention,
    rotate_and_write,
    top_k_threshold,
    top_p_threshold,
    write_pages,
)
from zjax_kernels.grouped import (
    copy_rows,
    grouped_activation,
    grouped_activation_backward,
    grouped_matmul,
    grouped_outer,
    grouped_sum,
    tune_grouped_matmul,
)
from zjax_kernels.norm import layer_norm, rms_norm
from zjax_kernels.quantise import dequantise_blocks, quantise_blocks
from zjax_kernels.sparse import (
    BigBird,
    BlockLayout,
    BSLongformer,
    Custom,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Pattern,
    Plan,
    SequencePlan,
    SparsityConfig,
    Variable,
    draw_layout,
    limit_window,
    make_plan,
    make_selected_plan,
    make_sequence_plan,
    plot_layout,
    sequence_attention,
    sparse_attention,
    sparse_attention_gradients,
    tune,
)

__all__ = [
    "BSLongformer",
    "BigBird",
    "BlockLayout",
    "Choice",
    "Custom",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Pattern",
    "Plan",
    "SequencePlan",
    "SparsityConfig",
    "Variable",
    "choose_experts",
    "copy_rows",
    "dequantise_blocks",
    "draw_layout",
    "few_rows_experts",
    "few_rows_matmul",
    "find_best",
    "grouped_activation",
    "grouped_activation_backward",
    "grouped_matmul",
    "grouped_outer",
    "grouped_sum",
    "lay_router",
    "layer_norm",
    "limit_window",
    "make_plan",
    "make_selected_plan",
    "make_sequence_plan",
    "paged_attention",
    "plot_layout",
    "quantise_blocks",
    "rms_norm",
    "rotate_and_write",
    "sequence_attention",
    "sparse_attention",
    "sparse_attention_gradients",
    "top_k_threshold",
    "top_p_threshold",
    "tune",
    "tune_grouped_matmul",
    "write_pages",
]
