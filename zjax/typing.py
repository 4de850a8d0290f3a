"""Interfaces between models, training and storage.

Dimension letters in annotations: B batch, L length (S for keys), H heads, K kv heads, D
head dim, M model width, F feed-forward width, V vocabulary, T tokens, N microbatches.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Device = Any
"""A `jax.Device`, which is not a type to type checkers."""
Params = Any
"""A tree of floating-point arrays."""
ModelState = Any
"""A tree of a model's variables besides parameters: BatchNorm statistics, caches."""
Batch = Any
"""A tree of arrays with the batch along the first dim; scalars, and arrays without rows
by `Model.entries`, are replicated."""
Metrics = dict[str, jax.Array]
"""Named scalars, and int32 arrays of `Totals`."""
Totals = tuple[Mapping[str, jax.Array], ...]
"""For each segment of a `Stack`, int32[num_blocks, ...] by name: sums over a batch."""
Move = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
"""`move(param, totals) -> param`: the next value of a parameter of a block, from the
block's totals over the global batch of a step."""
Logical = tuple[str | None, ...]
"""One name per array dim: `batch, length, embed, heads, kv_heads, head_dim, mlp, vocab,
experts, gates, capacity, layers, tensor`, or None."""


IGNORED = -100
"""Target of a token without loss, as in PyTorch and Hugging Face libraries."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Requirements of a loss on one array of a batch."""

    shape: tuple[int | str, ...] | None = None
    """Size of each dim; a letter is any size, equal in all entries. A first dim of `B`
    is split over devices and microbatches; arrays without `B` are replicated. None
    accepts any shape, with the batch first."""
    dtype: Any = None
    """Dtype, or a kind such as `numpy.integer`; None accepts any."""
    is_optional: bool = False
    """Whether a batch may lack the array."""
    num_ids: int = 0
    """Number of valid ids, from 0; 0 does not check them."""
    may_be_ignored: bool = False
    """Whether the id `IGNORED` is also valid."""
    may_be_negative: bool = True
    """Whether values below 0 are valid; negative ids never are."""

    @property
    def has_rows(self) -> bool:
        """Whether the first dim is the batch; False for a replicated array."""
        return self.shape is None or self.shape[:1] == ("B",)


Entries = Mapping[str, Entry]
"""Entries by path in the batch, such as `tokens` or `images/left`."""


class Loss(NamedTuple):
    """The loss of one microbatch.

    The loss is a mean over `weight` units, so that accumulation gives the weighted mean
    over the global batch, and float16 gradients keep their range whatever the number of
    tokens. Each device splits local rows into microbatches of adjacent rows: a loss may
    compare neighbours within a microbatch, but which rows share a microbatch depends on
    the number of devices.
    """

    value: jax.Array
    """float32[]: mean loss over `weight` units."""
    weight: jax.Array
    """float32[]: number of units (tokens, images); not differentiated."""
    model_state: ModelState
    """The model state after this microbatch, of unchanged structure."""
    metrics: Metrics
    """Scalars, averaged over microbatches by `weight`."""
    totals: Totals = ()
    """Sums over microbatches and over the devices that split the batch."""


class Auxiliary(NamedTuple):
    """Results of a block besides the carry; equal blocks return equal trees."""

    loss: jax.Array | None = None
    """float32[]: added to the mean loss of the microbatch, summed over blocks, and
    logged as `auxiliary_loss`. None adds nothing."""
    metrics: Mapping[str, jax.Array] = {}
    """float32[] by name, averaged over microbatches and over the blocks that return the
    name and that ran."""
    totals: Mapping[str, jax.Array] = {}
    """int32 arrays by name, of the shapes in `Segment.totals`. The arrays of each block
    are added up over the global batch of a step and returned with the metrics of the
    step. In a pipeline, microbatches of a device that have no weight add nothing."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A block split into a trunk and tiles; outputs of tiles are added to the carry."""

    split: Callable[[Params], tuple[Params, tuple[Params, ...]]]
    """Maps parameters of a block to (parameters of the trunk, parameters of each tile);
    all tiles are equal."""
    trunk: Callable[..., Any]
    """`trunk(params, carry, context, key) -> ((carry, tile_input), Auxiliary)`: the
    block without tiles, and the input of every tile."""
    tile: Callable[..., Any]
    """`tile(params, tile_input, key) -> addition to the carry`."""
    add: Callable[[Any, Any], Any] = operator.add
    """`add(carry, addition) -> carry`."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equal blocks that run one after another."""

    block: Callable[..., Any]
    """`block(params, carry, context, key) -> (carry, Auxiliary)`."""
    num_blocks: int
    tiles: Tiles | None = None
    """The block as trunk and tiles, if the parameters exceed one device."""
    totals: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Shape of each array in `Auxiliary.totals` of a block, by name."""
    moves: Mapping[str, Move] = dataclasses.field(default_factory=dict)
    """Functions that set parameters of a block, by path, after each optimizer step that
    is not skipped. Moved parameters are float32 in the block, too, and get no gradient
    and no update of the optimizer."""


RecordExperts = Callable[[Any], None]
"""Takes the experts of tokens, uint8 or int16 [..., K], while a layer is traced."""
LogPartition = Callable[[Any], Any]
"""Function from scores [..., V] to the logarithm of the sum of exponentials."""
logsumexp: LogPartition = functools.partial(jax.nn.logsumexp, axis=-1)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Functions that continue text: N tokens of any rows, each as a row of its own.

    What a block stores of earlier tokens is the affair of `attend(cache, how, q, k, v,
    stored) -> (outputs, cache)`, which each layer calls once; `how` tells which keys a
    token sees (`zjax.models.continuation.How`).
    """

    embed: Callable[..., Any]
    """`embed(params, batch) -> (carry, context)`: embeds `tokens` [N, 1] at `positions`
    [N, 1]; `token_mask` [N, 1] is False for padding, `num_tokens` [N] and `num_given`
    [N] are the tokens of the row, with and without tokens to come."""
    blocks: tuple[Callable[..., Any], ...]
    """For each segment, `block(params, carry, context, attend, caches, record=None) ->
    ((carry, tile_input), caches)`: the tokens through a block or, with tiles, through
    the trunk. `caches` has one entry per layer of the block. Each layer with experts
    calls `record` with the experts [N, 1, K] of the tokens, unless it is None."""
    num_layers: tuple[int, ...]
    """Layers of a block, for each segment."""
    lay: tuple[Callable[[Params], Params], ...]
    """For each segment, a function from the parameters of a block in the stack to the
    parameters that `blocks` takes."""
    score: Callable[..., Any]
    """`score(params, carry) -> float32[N, V]`: logits of the next token, from the
    parameters of the head."""
    log_partition: LogPartition = logsumexp
    """`log_partition(float32[N, V]) -> float32[N]`: the logarithm of the sum of
    exponentials of logits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropping:
    """Blocks and tokens that a training step leaves out; by default none.

    An evaluation, which has no random key, leaves out nothing.
    """

    num_kept: int = dataclasses.field(default=0, metadata={"static": True})
    """Tokens of each row that the blocks between the first and the last run on; 0 is
    all. Another number is another program."""
    once: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether all blocks with dropped tokens run on one subset, not on a subset
    each."""
    theta: Any = None
    """float32[]: probability that the last block runs; None runs all blocks."""


ATTENTION_WINDOW = "attention_window"
"""Name, under `schedule` in a batch, of the number of keys that a token sees, up to its
own position."""
NOTHING_DROPPED = Dropping()
"""The `Dropping` of steps that run all blocks on all tokens."""


class StepBatch(NamedTuple):
    """The batch of a training step, and what the step leaves out of the model."""

    batch: Batch
    dropping: Dropping = NOTHING_DROPPED

    @classmethod
    def of(cls, batch: "Batch | StepBatch") -> "StepBatch":
        """Returns a `StepBatch` as it is; makes one of a batch, to drop nothing."""
        return batch if isinstance(batch, cls) else cls(batch)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model as a sequence of blocks, as pipelines, offload and layer drop need it.

    `zjax.loss_of` makes the loss of a stack. The functions take no model state. From
    the key of the loss, the embedding gets `fold_in(key, 0)` and block i of all
    segments `fold_in(key, i + 1)`.
    """

    embed: Callable[..., Any]
    """`embed(params, batch, key) -> (carry, context)`; all blocks read the context,
    which depends on the batch alone and gets no gradient."""
    segments: tuple[Segment, ...]
    head: Callable[..., Any]
    """`head(params, carry, batch) -> (loss_sum, weight, metric_sums)`; sums divided by
    the weight make a `Loss`. In a pipeline the weight must depend on the batch
    alone."""
    split: Callable[[Params], tuple[Params, tuple[Params, ...], Params]]
    """Maps model parameters to (embedding, each segment, head). A segment has the tree
    of one block, with the arrays of all blocks stacked, or as
    `zjax.sharding.layers.Layers`. It selects leaves and computes nothing."""
    join: Callable[[Params, tuple[Params, ...], Params], Params]
    """The transpose of `split`, for gradients: the inverse of `split`, summing shared
    leaves."""
    shared: tuple[str, ...] = ()
    """Paths of leaves that both embed and head use, such as tied embeddings."""
    continuation: Continuation | None = None
    """Functions that continue text; None for a model that cannot."""
    factors: Callable[..., Any] | None = None
    """`factors(params, carry) -> (hidden, matrix)`, from the parameters of the head:
    logits are the product of hidden [B, L, N] and matrix [V, N]. A teacher needs this
    function."""
    take_tokens: Callable[..., Any] | None = None
    """`take_tokens(context, indices) -> context`, of the tokens int32[B, K] in
    ascending order. Random token dropping needs this function, and a carry of arrays
    [B, L, ...] that blocks map to equal shapes."""
    of_block: Callable[..., Any] | None = None
    """`of_block(context, number) -> context`: what block `number`, int32[], reads of
    the context; None if all blocks read the whole context."""
    target_logprobs: Callable[..., Any] | None = None
    """`target_logprobs(params, carry, targets, temperature) -> (logprobs, entropies)`,
    float32[B, L], from the parameters of the head and targets int32[B, L], -100 for
    none. Reinforcement learning needs this function."""
    values: Callable[..., Any] | None = None
    """`values(params, carry) -> float32[B, L]`, from the parameters of the head: the
    value of each token. Critics and reward models need this function."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and a loss as pure functions, whatever library wrote the model."""

    init: Callable[[jax.Array], tuple[Params, ModelState]]
    """`init(key) -> (params, model_state)`; runs under jit with sharded outputs."""
    loss: Callable[[Params, ModelState, Batch, jax.Array | None], Loss]
    """`loss(params, model_state, batch, key)`; a key of None means evaluation. With a
    stack the loss is `zjax.loss_of(stack)`: another loss is refused where a run trains
    stacks."""
    bind: Callable[[Params, ModelState], Any]
    """`bind(params, model_state) -> module` of the user's library, in evaluation
    mode."""
    logical: Callable[[Params], Any]
    """Maps abstract params to a tree of `Logical`, or None for unknown arrays."""
    given: Callable[[], tuple[Params, ModelState]] | None = None
    """Existing weights (a loaded NNX instance), placed leaf by leaf instead of
    `init`."""
    stack: Stack | None = None
    separable: bool = False
    """Whether devices may compute gradients of local rows independently. The loss must
    be the weighted mean of losses of single rows, be 0 without weight, use no model
    state, and draw random numbers by a row's index in the microbatch. Row i is then in
    microbatch i mod N on every mesh, so all meshes draw equal numbers. A router may
    compare the tokens of a device. At ZeRO stage 3 all parameters are gathered at once,
    so the loss must not loop over stacked layers. A parameter with a dim `experts`
    holds the experts of the device, if the mesh splits experts."""
    takes_layers_apart: bool = False
    """Whether the loss accepts `zjax.sharding.layers.Layers` for arrays with a first
    dim `layers`, so that each layer is gathered and reduced separately."""
    loops_over_layers: bool = False
    """Whether the loss loops over layers, gathering the parameters of each layer in
    turn."""
    init_layer: Callable[[jax.Array, jax.Array], Params] | None = None
    """`init_layer(key, number) -> params`: as `init`, with only block `number` in each
    array that stacks blocks, for models that must be initialised block by block."""
    keeps: Callable[..., bool] | None = None
    """Policy of `jax.checkpoint` for the residuals to save besides parameters; None
    saves residuals that are expensive to compute. Under offload, blocks save these
    residuals on the devices, casts of parameters included. Blocks save only inputs if
    this is None, with `model.remat="full"`, or if `model.activation_memory` is not the
    device."""
    inputs: Batch | None = None
    """Shapes of a batch for `loss`, if known; used to detect that a resumed run has
    another loss."""
    entries: Entries = dataclasses.field(default_factory=dict)
    """Requirements of the loss on each array of a batch; if empty, any batch is
    accepted and all arrays except scalars have rows."""
    cast: tuple[str, ...] | None = None
    """Paths of the floating-point arrays of a batch to cast to the compute dtype. None
    lets `zjax.initialize` find the paths; every other caller casts nothing for None."""

    @property
    def runs_by_block(self) -> bool:
        """Whether offload runs the model as programs of single blocks."""
        return self.stack is not None and self.takes_layers_apart
