"""The records through which models, training and storage meet; a legend of letters.

Dimension letters in annotations: B batch, L length (S for keys), H heads, K kv heads,
D head dim, M model width, F feed-forward width, V vocabulary, T tokens, N microbatches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Device = Any
"""A `jax.Device`, which type checkers do not take for a type."""
Params = Any
"""A tree of floating-point arrays."""
ModelState = Any
"""A tree of what a model carries besides parameters: BatchNorm statistics, caches."""
Batch = Any
"""A tree of arrays whose first dim is the batch (scalars are the same everywhere, and
so is what `Model.entries` says has no rows)."""
Metrics = dict[str, jax.Array]
"""Named scalars."""
Logical = tuple[str | None, ...]
"""One name per array dim: `batch, length, embed, heads, kv_heads, head_dim, mlp, vocab,
experts, capacity, layers, tensor`, or None."""


IGNORED = -100
"""The target of a token that does not count, as in other libraries."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a loss asks of one array of a batch."""

    shape: tuple[int | str, ...] | None = None
    """Size of each dim; a letter is any size that is the same in all entries. The first
    dim is `B` where the array holds rows, of which each device and each microbatch gets
    some; all others are replicated. None asks nothing, and takes it for rows."""
    dtype: Any = None
    """Dtype, or a kind such as `numpy.integer`; None asks nothing."""
    is_optional: bool = False
    """Whether a batch may come without it."""
    num_ids: int = 0
    """Ids that it may hold, from 0 on; 0 does not check them."""
    may_be_ignored: bool = False
    """Whether it may also hold `IGNORED`."""

    @property
    def has_rows(self) -> bool:
        """Whether its first dim is cut; False for what is replicated."""
        return self.shape is None or self.shape[:1] == ("B",)


Entries = Mapping[str, Entry]
"""Entries by path in the batch, such as `tokens` or `images/left`."""


class Loss(NamedTuple):
    """What one microbatch gives.

    The loss is a mean and `weight` says over how many units, so that accumulation gives
    the weighted mean over the global batch, and float16 gradients keep their range
    whatever the number of tokens. Each device cuts the rows that it holds into
    microbatches of adjacent rows: a loss may compare neighbours as long as they lie in
    one microbatch, and which rows do depends on the number of devices.
    """

    value: jax.Array
    """float32[]: mean loss over `weight` units."""
    weight: jax.Array
    """float32[]: number of units (tokens, images); not differentiated."""
    model_state: ModelState
    """The model state after this microbatch, of unchanged structure."""
    metrics: Metrics
    """Scalars averaged over microbatches with the same weights."""


class Auxiliary(NamedTuple):
    """What a block gives besides its carry: scalars, the same ones for equal blocks."""

    loss: jax.Array | None = None
    """float32[]: of the microbatch, added to its mean loss and shown among the metrics
    as `auxiliary_loss`; the losses of all blocks are added up. None adds nothing."""
    metrics: Mapping[str, jax.Array] = {}
    """float32[] by name, averaged over the blocks that give them and, as other metrics,
    over microbatches."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A block as a trunk, to whose stream tiles add one after another."""

    split: Callable[[Params], tuple[Params, tuple[Params, ...]]]
    """Parameters of a block -> (the trunk's, each tile's); tiles are alike."""
    trunk: Callable[..., Any]
    """`trunk(params, carry, context, key) -> ((carry, entering), Auxiliary)`: the block
    without its tiles, and what every tile reads."""
    tile: Callable[..., Any]
    """`tile(params, entering, key) -> what it adds to the carry`."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equal blocks run one after another."""

    block: Callable[..., Any]
    """`block(params, carry, context, key) -> (carry, Auxiliary)`."""
    num_blocks: int
    tiles: Tiles | None = None
    """The same block in parts, where its parameters are too many to be in one place."""


@dataclasses.dataclass(frozen=True)
class CachedBlock:
    """How a block of a segment continues text, with a cache of its own.

    `starts` int32[B] is the first column of each prompt.
    """

    read_prompt: Callable[..., Any]
    """`read_prompt(params, carry, context, starts, room, padded) -> ((carry, entering),
    cache)`: whole prompts through a block or, where it has tiles, through its trunk."""
    read_token: Callable[..., Any]
    """`read_token(params, carry, context, starts, column, cache) -> ((carry, entering),
    cache)`: the same for one more column."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How a line of blocks continues text.

    `settings` are those of `zjax.models.generate`.
    """

    check: Callable[..., None]
    """`check(length, settings, key)` refuses settings that cannot work."""
    embed: Callable[..., Any]
    """`embed(params, tokens, starts, column) -> (carry, context)`, of tokens that stand
    from a column on."""
    blocks: tuple[CachedBlock, ...]
    """One for each segment."""
    score: Callable[..., Any]
    """`score(params, carry) -> float32[B, V]`, of the tokens that may follow a column;
    takes the head's parameters."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model as a line of blocks: the seam of pipelines, offload and layer drop.

    `zjax.loss_of` makes its loss. Its parts take no model state. Of the key that a loss
    gets, the embedding gets `fold_in(key, 0)`, and block i of all segments
    `fold_in(key, i + 1)`.
    """

    embed: Callable[..., Any]
    """`embed(params, batch, key) -> (carry, context)`; every block reads context, which
    follows from the batch alone and gets no gradient."""
    segments: tuple[Segment, ...]
    head: Callable[..., Any]
    """`head(params, carry, batch) -> (loss_sum, weight, metric_sums)`, for `Loss` once
    divided by the weight, which a pipeline needs to follow from the batch alone."""
    split: Callable[[Params], tuple[Params, tuple[Params, ...], Params]]
    """Model parameters -> (embed's, each segment's, head's). The tree of a segment is
    that of one block, with arrays that stack those of all its blocks, or their
    `zjax.sharding.layers.Layers`. It selects leaves and computes nothing."""
    join: Callable[[Params, tuple[Params, ...], Params], Params]
    """The transpose of `split`, for gradients: its inverse, but for shared leaves, of
    which it returns the sum."""
    shared: tuple[str, ...] = ()
    """Paths of leaves that both embed and head use, such as tied embeddings."""
    continuation: Continuation | None = None
    """How it continues text; None where it does not."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its loss as pure functions, whatever library wrote it."""

    init: Callable[[jax.Array], tuple[Params, ModelState]]
    """`init(key) -> (params, model_state)`; runs under jit, on its shards."""
    loss: Callable[[Params, ModelState, Batch, jax.Array | None], Loss]
    """`loss(params, model_state, batch, key)`; a key of None means evaluation."""
    bind: Callable[[Params, ModelState], Any]
    """`bind(params, model_state) -> view`: the module as its library calls it, in
    evaluation mode."""
    logical: Callable[[Params], Any]
    """Abstract params -> tree of `Logical`, or of None where nothing is known."""
    given: Callable[[], tuple[Params, ModelState]] | None = None
    """Weights that exist already (a loaded NNX instance), to be placed leaf by leaf in
    place of `init`."""
    stack: Stack | None = None
    separable: bool = False
    """Whether the loss is the weighted mean of losses of single rows, is 0 without
    weight, uses no model state, and draws for each row by its number in the microbatch
    if at all: devices then differentiate alone, and of N microbatches row i is in i mod
    N on every mesh, so that all meshes draw the same. At ZeRO stage 3 its parameters
    are fetched at once, so it must not loop over stacked layers. Of a parameter with a
    dim `experts` it is given those of the device, on a mesh that splits them."""
    takes_layers_apart: bool = False
    """Whether the loss takes `zjax.sharding.layers.Layers` for the arrays whose first
    dim is `layers`, so that each layer can be gathered and reduced alone."""
    loops_over_layers: bool = False
    """Whether the loss runs its layers in a loop, which fetches the parameters of each
    as it comes to it."""
    init_layer: Callable[[jax.Array, jax.Array], Params] | None = None
    """`init_layer(key, number) -> params`, as `init` gives them, but with one layer in
    each array that stacks layers: what would not fit at once starts layer by layer."""
    keeps: Callable[..., bool] | None = None
    """What the backward pass keeps besides parameters, as a policy of `jax.checkpoint`;
    None keeps what is dear to compute. Blocks that run one by one, as offload has them
    run, keep it on the devices, also what is but made of parameters; what enters them
    alone for None, `model.remat="full"` or a `model.activation_memory` elsewhere."""
    inputs: Batch | None = None
    """Shapes of a batch for `loss`, by which a run that goes on tells whether it is
    another loss; None where nobody gave any."""
    entries: Entries = dataclasses.field(default_factory=dict)
    """What the loss asks of each array of a batch; empty asks nothing, and takes all
    arrays but scalars for rows."""
    cast: tuple[str, ...] | None = None
    """Paths of the floating-point arrays of a batch that are cast to the compute dtype;
    all others keep theirs. `zjax.initialize` finds them for None, which else casts
    nothing."""
