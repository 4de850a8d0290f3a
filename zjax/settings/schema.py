"""Every setting of a run, in one frozen tree. Nothing else in zjax is configurable."""

import math
from typing import Annotated, ClassVar, Literal

from zjax.settings import compress as compression
from zjax.settings import derived, ranges
from zjax.settings import distill as distillation
from zjax.settings import preference as preferences
from zjax.settings import prune as pruning
from zjax.settings import quantize as quantization
from zjax.settings import rl as reinforcement
from zjax.settings.choices import Choice, section


class NameTable(tuple[tuple[str, str], ...]):
    """Ordered pairs of names, hashable; written as a mapping."""


@section
class DimRule:
    """Names for the dims of parameters by path; the first rule that matches wins."""

    pattern: str = ".*"
    """Regular expression searched in paths like `blocks/attention/query/kernel`."""
    dims: tuple[str, ...] = ()
    """Name of each dim, from the first on: heads, kv_heads, mlp, vocab and tensor are
    sharded over `mesh.tensor`, embed, head_dim and '' are not."""


@section
class Mesh:
    """Devices along each mesh axis, slowest link first; -1 takes the remaining devices.

    `mesh="auto"` sets pipeline, sequence and tensor to 0: zjax chooses them.
    """

    pipeline: ranges.OpenAxis = 1
    """Stages of consecutive layers."""
    replica: ranges.Axis = 1
    """Copies of the whole sharded model (hybrid sharding, HSDP)."""
    data: ranges.Axis = -1
    """Shards of the batch, over which ZeRO shards the state."""
    expert: ranges.Axis = 1
    """Shards of the experts of a mixture; they shard the batch, too."""
    sequence: ranges.OpenAxis = 1
    """Shards of each sequence."""
    tensor: ranges.OpenAxis = 1
    """Shards of each weight matrix."""
    names: NameTable = NameTable()
    """Translates dim names in the metadata of your model, such as {"tp": "tensor",
    "fsdp": ""}, to names as in `rules`, or '' for a dim that is not sharded."""
    rules: tuple[DimRule, ...] = ()
    """Dim names of parameters, which override those of the model."""


@section
class Offload(Choice):
    """Optimizer state and master weights stored off the devices between updates."""

    parameter_memory: Literal["device", "pinned_host", "nvme"] = "device"
    """Memory of the blocks' compute parameters until a block runs."""
    gradient_memory: Literal["device", "pinned_host", "nvme"] = "device"
    """Memory of gradients between microbatches, and of pending gradients of offloaded
    updates until the norm is known. Pending ones stay on the device if they fit beside
    the block inputs or, in place of `nvme`, are small."""
    nvme_paths: tuple[str, ...] = ()
    """Directories of arrays stored on `nvme`, one per disk; each process makes a
    subdirectory, and removes it at its end."""
    delay_updates_from: ranges.Step = -1
    """First step, counted from 1, whose gradients are applied one step late, during the
    next backward pass, so that no update waits for a norm (arXiv:2101.06840, section
    5.2, where it is 40); -1 for never. Pending gradients are stored in
    `gradient_memory`; a checkpoint applies them first."""


@section
class PinnedHost(Offload):
    """Host memory."""

    is_usual = True


@section
class Nvme(Offload):
    """Disks, `nvme_paths`."""


@section
class AutoOffload(Offload):
    """Free device memory, then the host, then `nvme_paths`."""

    kind: ClassVar[str] = "auto"


@section
class Sharded:
    """State that is sharded over `mesh.replica` (nodes), too.

    No node holds a whole copy of the state. The settings are ZeRO++ (arXiv:2306.10209).
    """

    secondary_partition: bool = False
    """Whether each node gathers the compute parameters once per step and stores them
    sharded over `mesh.data`, so that passes gather inside the node (hpZ)."""
    quantized_weights: bool = False
    """Whether gathers across nodes move int8 blocks of the compute parameters (qwZ)."""
    quantized_gradients: bool = False
    """Whether gradients are reduced as int4 blocks, inside the nodes, then across them
    (qgZ)."""


@section
class Zero:
    """State that is sharded over devices or offloaded."""

    stage: Literal[0, 1, 2, 3] = 1
    """0 shards nothing, 1 optimizer state and master weights, 2 also gradients, 3 also
    parameters."""
    min_shard_elements: Annotated[int, ranges.at_least(0, 2**63 - 1)] = 16_384
    """Smaller arrays are not sharded: gathering them costs more than it saves."""
    offload: PinnedHost | Nvme | AutoOffload | None = None
    """Memory of optimizer state and master weights between updates; None for the
    devices."""
    replicas: Sharded | None = None
    """Shards of stage 3 over `mesh.replica`; None keeps a copy of the state in each."""

    @property
    def placement(self) -> Offload:
        """Settings of offload; without offload all arrays are on the devices."""
        return self.offload or Offload()

    @property
    def messages(self) -> Sharded:
        """Settings of ZeRO++, all off if each replica has a copy of the state."""
        return self.replicas or Sharded()

    @property
    def optimizer_memory(self) -> str:
        """Memory of optimizer state and master weights between updates."""
        return self.offload.kind if self.offload else "device"

    @property
    def offloads_state(self) -> bool:
        """Whether master weights and optimizer state may be stored off the devices."""
        return self.offload is not None

    @property
    def offloads_blocks(self) -> bool:
        """Whether compute parameters of blocks are stored off the devices."""
        return self.placement.parameter_memory != "device"


@section
class Pipeline(Choice):
    """Schedule of pipeline stages."""

    @property
    def chunks_per_stage(self) -> int:
        """Chunks of layers per device."""
        return self.num_chunks if isinstance(self, Interleaved) else 1

    @property
    def recomputes(self) -> bool:
        """Whether a stage saves only its input for the backward pass."""
        return isinstance(self, Recomputing) and self.recompute


@section
class Recomputing(Pipeline):
    """Schedule whose stages may recompute their layers."""

    recompute: bool = True
    """Whether a stage saves only its input for the backward pass and recomputes the
    rest; if not, it saves what `model.remat` says."""


@section
class OneFOneB(Recomputing):
    """Alternates forward and backward passes."""

    kind: ClassVar[str] = "1f1b"


@section
class Gpipe(Recomputing):
    """Runs all forward passes first, which takes as long as `1f1b`."""


@section
class Interleaved(Recomputing):
    """Gives each device several chunks of layers; smaller bubbles, more memory."""

    num_chunks: Annotated[int, ranges.at_least(2, ranges.MAX_LAYERS)] = 2
    """Chunks of layers per device."""


@section
class ZbH1(Pipeline):
    """Computes weight gradients separately; smaller bubbles, more memory.

    A stage saves what `model.remat` says.
    """


@section
class LossScale:
    """Loss scaling for float16 (arXiv:1710.03740); unused by bfloat16 and float32."""

    initial: ranges.PowerOfTwo = 65_536.0
    """First scale; a power of two."""
    window: ranges.Natural = 1_000
    """Clean steps before the scale doubles; 0 keeps the scale fixed."""
    hysteresis: ranges.Count = 2
    """Overflows tolerated before the scale halves."""
    consecutive_hysteresis: bool = False
    """Whether a clean step restores the tolerance at once."""
    minimum: Annotated[ranges.PowerOfTwo, ranges.AtMost("initial")] = 1.0
    """The scale never falls below this."""


@section
class Precision:
    """Dtypes of everything that is stored, computed or summed."""

    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters as the optimizer sees them."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Parameters and activations in the forward and backward pass."""
    matmul_dtype: Literal["compute", "float8"] = "compute"
    """Operands of the built-in models' attention projections and feed-forward."""
    batch_invariant: bool = False
    """Whether the log-probability of a token, given the tokens before it, is the same
    bits in all batches: in training, evaluation and generation, in rows packed in any
    way, in pages and chunks, beside any other rows."""
    grad_sum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Gradients as they are added over microbatches."""
    reduce_dtype: Literal["compute", "float32"] = "compute"
    """Gradients as they are added over devices."""
    on_nonfinite: Literal["skip", "stop", "update"] = "skip"
    """After a NaN or infinite gradient, `skip` skips the step, and ends the run after
    `max_skipped_in_a_row`; `stop` ends the run and names the step; `update` does not
    look for them, so that updates need not wait for all gradients, and ends the run at
    the first such loss. Overflows that a lower loss scale may cure are skipped, not
    counted."""
    max_skipped_in_a_row: ranges.Count = 20
    """Skipped steps in a row that end a run."""
    loss_scale: LossScale = LossScale()


@section
class ParamGroup:
    """Settings for parameters whose path matches a pattern; the first match wins."""

    pattern: str = ".*"
    """Regular expression searched in paths like `blocks/attention/query/kernel`."""
    learning_rate_scale: ranges.NonNegative = 1.0
    """Factor on the learning rate; 0 freezes the parameters: they are stored once, in
    the compute dtype, without gradients or moments; under offload, in pipelines and
    with steps by replica they keep master weights and gradients."""
    weight_decay: Annotated[
        float,
        ranges.Range(
            lambda x: 0 <= x < math.inf or x == -1,
            "use 0 or more, or -1 for optimizer.weight_decay",
        ),
    ] = -1.0
    """Weight decay of the matrices of this group, and of its vectors under
    `optimizer.decay_vectors`; -1 takes `optimizer.weight_decay`."""


@section
class Warm(Choice):
    """Schedule that begins with a warm-up."""

    num_warmup_steps: Annotated[
        int, ranges.or_derived(0, ranges.MAX_STEPS, "a tenth of the run")
    ] = -1
    """Steps until the learning rate has risen from 0 to the peak; -1 takes 100, or a
    tenth of the steps of a shorter run than 1,000."""
    warmup: Literal["linear", "log"] = "linear"
    """Shape of the rise; `log` rises in the logarithm of the step, as in DeepSpeed."""

    def warmup_steps(self, total: int) -> int:
        """Steps of the warm-up, out of all steps of a run."""
        open_steps = min(100, total // 10)
        return open_steps if self.num_warmup_steps == -1 else self.num_warmup_steps


@section
class Constant(Warm):
    """Learning rate that stays at the peak."""


@section
class Decaying(Warm):
    """Schedule that ends below the peak."""

    final_fraction: ranges.Fraction = 0.1
    """Learning rate of the last step, as a fraction of the peak."""


@section
class Linear(Decaying):
    """Learning rate that falls on a line."""


@section
class Cosine(Decaying):
    """Learning rate that falls by half a cosine (arXiv:1608.03983)."""


@section
class Wsd(Decaying):
    """Warm-up, stable, then linear decay (arXiv:2404.06395)."""

    decay_fraction: ranges.Fraction = 0.2
    """Fraction of the steps that decay."""


@section
class WarmupLr(Warm):
    """WarmupLR of DeepSpeed, step by step: the rate stays at the peak."""


@section
class WarmupDecayLr(Warm):
    """WarmupDecayLR of DeepSpeed, step by step: the rate falls on a line to 0."""


@section
class WarmupCosineLr(Decaying):
    """WarmupCosineLR of DeepSpeed, step by step."""


@section
class CycledMomentum:
    """Momentum in place of `b1` that falls while the learning rate rises."""

    min_momentum: ranges.Decay = 0.8
    """Momentum of step 0, and at the peak of the rate."""
    max_momentum: ranges.Decay = 0.9
    """Momentum of step 1, and at the end of the cycle."""
    momentum_decay_rate: ranges.NonNegative = 0.0
    """After the cycle the momentum grows as 1 + `momentum_decay_rate` x."""


@section
class OneCycle(Choice):
    """OneCycle of DeepSpeed, step by step (arXiv:1803.09820).

    The rate rises from `min_learning_rate` to `peak_learning_rate`, falls back, and
    then decays as 1 / (1 + `decay_rate` x).
    """

    min_learning_rate: ranges.NonNegative = 0.0
    """Learning rate of step 0, and at the end of the cycle."""
    num_rise_steps: Annotated[int, ranges.at_least(1, ranges.MAX_CYCLE_STEPS)] = 2_000
    num_fall_steps: Annotated[
        int, ranges.or_derived(0, ranges.MAX_CYCLE_STEPS, "the rise")
    ] = -1
    """Steps back to the minimum; -1 takes `num_rise_steps`."""
    num_rise_stairs: Annotated[int, ranges.at_least(0, ranges.MAX_STAIRS)] = 0
    """Stairs of equal length on which the rate rises; 0 for a line."""
    num_fall_stairs: Annotated[
        int, ranges.or_derived(0, ranges.MAX_STAIRS, "the rise")
    ] = -1
    """The same for the fall; -1 takes `num_rise_stairs`."""
    decay_rate: ranges.NonNegative = 0.0
    num_decay_steps: ranges.Count = 1
    """Steps after the cycle in which x grows by 1."""
    momentum: CycledMomentum | None = None


@section
class RangeTest(Choice):
    """LRRangeTest of DeepSpeed, step by step (arXiv:1803.09820).

    The rate is start_learning_rate (1 + growth x), in place of the peak; x grows by 1
    in `num_steps` steps.
    """

    start_learning_rate: ranges.Positive = 1e-3
    growth: ranges.NonNegative = 1.0
    num_steps: ranges.Count = 2_000
    staircase: bool = False
    """Whether x is a whole number."""


@section
class FirstMoment(Choice):
    """Rule with a first moment."""

    b1: ranges.Decay = 0.9
    """First moment decay, or momentum."""


@section
class StoredMomentum(FirstMoment):
    """Rule that stores moments in a dtype of choice."""

    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Stored moments, rounded stochastically; `int8` leaves vectors in float32."""


@section
class AdamMoments(FirstMoment):
    """Rule with a first and a second moment."""

    b2: ranges.Decay = 0.95
    """Second moment decay."""
    eps: ranges.Positive = 1e-8


@section
class Corrected(AdamMoments):
    """Rule whose moments may be corrected."""

    bias_correction: bool = True
    """Whether Adam's moments are corrected for their start at 0. DeepSpeed's 1-bit
    optimizers do not correct them."""


@section
class StoredAdam(Corrected, StoredMomentum):
    """Rule of Adam's moments, stored in a dtype of choice."""


@section
class Adamw(StoredAdam):
    """AdamW (arXiv:1711.05101)."""


@section
class Adam(StoredAdam):
    """Adam (arXiv:1412.6980), which adds the weight decay to the gradient."""


@section
class Lamb(StoredAdam):
    """LAMB (arXiv:1904.00962)."""


@section
class Lion(StoredMomentum):
    """Lion (arXiv:2302.06675)."""

    b2: ranges.Decay = 0.95
    """Second moment decay."""


@section
class Sgd(StoredMomentum):
    """SGD with momentum `b1`."""


@section
class SgdL2(StoredMomentum):
    """SGD with momentum `b1` that adds the weight decay to the gradient."""


@section
class Adafactor(Choice):
    """Adafactor (arXiv:1804.04235)."""


@section
class Muon(AdamMoments, StoredMomentum):
    """Muon (arXiv:2502.16982) with momentum `b1`; embeddings and vectors have Adam."""


@section
class Compressed(Corrected):
    """Rule whose replicas send few bits after a warm-up in full precision."""

    freeze_step: ranges.Natural = 0
    """Last step that sends gradients; then second moments are kept. 0 for 15 % of the
    steps."""


@section
class OnebitAdam(Compressed):
    """1-bit Adam (arXiv:2102.02888), one bit per number after `freeze_step` steps."""


@section
class OnebitLamb(Compressed):
    """1-bit LAMB (arXiv:2104.06069), one bit per number after `freeze_step` steps."""


@section
class ZeroOneAdam(Compressed):
    """0/1 Adam (arXiv:2202.06009): few gradients in full, then local steps."""

    var_update_scaler: ranges.Count = 16
    """Updates of second moments until the interval between them doubles."""
    local_step_scaler: ranges.Natural = 0
    """Local steps until the interval between exchanges doubles; 0 for `freeze_step`."""
    local_step_clipper: ranges.Count = 16
    """Longest interval between exchanges."""


Schedule = (
    Constant
    | Linear
    | Cosine
    | Wsd
    | WarmupLr
    | WarmupDecayLr
    | WarmupCosineLr
    | OneCycle
    | RangeTest
)
Rule = (
    Adamw
    | Adam
    | Lamb
    | Lion
    | Sgd
    | SgdL2
    | Adafactor
    | Muon
    | OnebitAdam
    | OnebitLamb
    | ZeroOneAdam
)


@section
class Optimizer:
    """The update rule and the learning rate by step."""

    rule: Rule = Adamw()
    peak_learning_rate: ranges.Positive = 3e-4
    schedule: Schedule = Cosine()
    """Learning rate by step."""
    weight_decay: ranges.NonNegative = 0.1
    """Decay of matrices, decoupled except under `adam` and `sgd_l2`, which add it to
    the gradient."""
    decay_vectors: bool = False
    """Whether biases, norm scales and other vectors decay as well, as in DeepSpeed."""
    clip_norm: ranges.Limit = derived.OfferedFloat(1.0)
    """Global gradient norm limit; `inf` turns clipping off. A gradient
    transformation that you give is clipped only if this is set."""
    ema_decay: Annotated[ranges.Decay, ranges.NoneAt(0)] = 0.0
    """Exponential moving average of the parameters; 0 keeps none."""
    groups: tuple[ParamGroup, ...] = ()
    """Exceptions to the learning rate and the decay, by parameter path."""


@section
class LocalSteps:
    """Rounds of steps that each replica takes alone (DiLoCo, arXiv:2311.08105)."""

    num_steps: ranges.Count = 500
    """Steps that replicas take before they exchange outer gradients."""
    num_synchronous_steps: ranges.Natural = 0
    """Steps in which replicas still exchange gradients, before they take local ones; as
    DiLoCo starts from a trained model."""
    outer_learning_rate: ranges.Positive = 0.7
    outer_momentum: ranges.Decay = 0.9
    """Nesterov momentum of outer gradients."""
    num_fragments: Annotated[ranges.Count, ranges.AtMost("num_steps")] = 1
    """Parts of the model that are exchanged at different steps of a round."""
    delay: ranges.Natural = 0
    """Steps that replicas take while a fragment is on its way."""
    mixing: ranges.Decay = 0.0
    """Weight of the replica's parameters when it merges a fragment."""


@section
class Communication:
    """Communication between the copies of the model along `mesh.replica`."""

    codec: Literal[
        "none", "bfloat16", "float8", "int8", "int4", "int2", "top_k", "onebit"
    ] = "none"
    """Form of the numbers on the wire, beside float32 sums and with error feedback from
    8 bits down; `none` leaves the reduction to `precision.reduce_dtype`, and outer
    gradients in float32."""
    local_steps: LocalSteps | None = None
    """Rounds of local steps; None exchanges gradients in every step."""

    @property
    def rounds(self) -> LocalSteps:
        """Settings of rounds; under 0/1 Adam one fragment and no delay, the default."""
        return self.local_steps or LocalSteps()


@section
class ScaledRope(Choice):
    """Slower rotations, for sequences longer than in the training of the model."""

    factor: Annotated[float, ranges.at_least(1)] = 1.0
    """How many times longer sequences may be."""


@section
class LinearRope(ScaledRope):
    """Positions divided by `factor` (arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"


@section
class ExtendedRope(ScaledRope):
    """Rotations that depend on the longest sequence before."""

    original_length: ranges.Tokens = 0
    """Longest sequence before."""


@section
class DynamicRope(ExtendedRope):
    """A base that rises with the row's longest position, beyond `original_length`."""

    kind: ClassVar[str] = "dynamic"


@section
class Yarn(ExtendedRope):
    """Positions of slow channels divided (YaRN, arXiv:2309.00071)."""

    beta_fast: ranges.Positive = 32.0
    """Channels with more turns than this in `original_length` stay as they are."""
    beta_slow: ranges.Positive = 1.0
    """Channels with fewer turns than this are divided by `factor`."""
    attention_factor: ranges.NonNegative = 0.0
    """Factor of rotated queries and of keys; 0 takes 0.1 ln(`factor`) + 1 under `yarn`,
    and the root of 1 + ln(`factor`) / ln(`original_length`) under `longrope`."""
    truncate: bool = True
    """Whether the bounds are rounded to channels, outwards."""
    mscale: ranges.NonNegative = 0.0
    """The `attention_factor` is s(`mscale`) / s(`mscale_all_dim`) where both are set,
    with s(x) = 0.1 x ln(`factor`) + 1, as in DeepSeek."""
    mscale_all_dim: ranges.NonNegative = 0.0
    """Attention scores are multiplied by s(`mscale_all_dim`) squared; 0 leaves them."""


@section
class Llama3(ExtendedRope):
    """Positions of slow channels divided, by other bounds (arXiv:2407.21783)."""

    low_frequency_factor: ranges.Positive = 1.0
    """Channels with fewer turns than this in `original_length` are divided by
    `factor`."""
    high_frequency_factor: ranges.Positive = 4.0
    """Channels with more turns than this stay as they are."""


@section
class Longrope(ExtendedRope):
    """Positions of each pair of channels divided by a number (arXiv:2402.13753)."""

    short_factors: tuple[float, ...] = ()
    """Divisors, one for each pair of channels that rotate, in rows of at most
    `original_length` positions."""
    long_factors: tuple[float, ...] = ()
    """Divisors in longer rows; text that is generated counts with all its tokens."""
    attention_factor: ranges.NonNegative = 0.0
    """Factor of rotated queries and of keys; 0 takes 0.1 ln(`factor`) + 1 under `yarn`,
    and the root of 1 + ln(`factor`) / ln(`original_length`) under `longrope`."""


RopeScaling = LinearRope | DynamicRope | Yarn | Llama3 | Longrope


@section
class Learned(Choice):
    """Table of positions."""

    first: ranges.Tokens = 0
    """Row of the table for the first token: 2 in RoBERTa."""


@section
class Rotary(Choice):
    """Rotations of queries and keys by position (RoPE, arXiv:2104.09864)."""

    theta: ranges.Positive = 10_000.0
    """Base of the wavelengths."""
    scaling: RopeScaling | None = None
    """Slower rotations, for sequences longer than in the training of the model."""
    size: ranges.Width = 0
    """Channels of each head that rotate, the first; 0 takes all."""
    unrotated_every: ranges.Layers = 0
    """Every n-th layer does not rotate (NoPE, arXiv:2305.19466), as in SmolLM3; 0
    rotates in all layers."""
    pairs: Literal["halves", "adjacent"] = "halves"
    """Channels that rotate together: i of the first half and i of the second, as in
    Llama, or 2 i and 2 i + 1, as in DeepSeek."""
    max_positions: ranges.Tokens = 0
    """Longest sequence that the model is for, which exports state and
    `checkpoint.init_from` brings (`max_position_embeddings`); 0 takes
    `model.max_length`."""


@section
class PerHead(Choice):
    """Pattern of live blocks that may differ from head to head."""

    different_layout_per_head: bool = False


@section
class Horizontal(PerHead):
    """Pattern whose global blocks may see everything."""

    horizontal_global_attention: bool = False
    """Whether global blocks of an encoder see everything, too; they always do under
    `bigbird` and `bslongformer`."""


@section
class Globals(PerHead):
    """Pattern with a number of global blocks."""

    num_global_blocks: ranges.Tokens = 1
    """Blocks that all see: the last of each window of `fixed`, the first of a sequence
    under `bigbird`."""


@section
class Random(PerHead):
    """Pattern with random blocks."""

    num_random_blocks: ranges.OpenTokens = -1
    """Random blocks per row; -1 is 1 under `bigbird` and 0 under `variable`."""
    seed: ranges.Seed = 0
    """Seed of the random blocks."""


@section
class Sliding(Choice):
    """Pattern with a window that slides."""

    num_sliding_window_blocks: ranges.SomeTokens = 3
    """Width of the window, centred on the row."""


@section
class GlobalRanges(Choice):
    """Pattern with listed global blocks."""

    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all see."""
    global_block_end_indices: tuple[int, ...] = ()
    """One past the end of each range that starts at them; () for single blocks."""


@section
class Fixed(Globals, Horizontal):
    """Adjacent windows, with global blocks (arXiv:1904.10509)."""

    num_local_blocks: ranges.SomeTokens = 4
    """Blocks per window."""
    num_different_global_patterns: ranges.SomeTokens = 1
    """Places of the global blocks, through which heads cycle."""


@section
class Variable(Horizontal, Random, GlobalRanges):
    """Adjacent windows of listed sizes, with global and random blocks."""

    local_window_blocks: tuple[int, ...] = (4,)
    """Blocks of each window; the last size repeats."""


@section
class Bigbird(Globals, Random, Sliding):
    """Sliding window with global and random blocks (arXiv:2007.14062)."""


@section
class Bslongformer(Sliding, GlobalRanges):
    """Sliding window with global blocks (arXiv:2004.05150)."""


@section
class Local(Sliding):
    """Sliding window alone."""


@section
class Dense(Choice):
    """All blocks."""


@section
class Auto(Choice):
    """Attention kernel that zjax chooses; the log names it."""


@section
class Cudnn(Choice):
    """Attention by cuDNN, or an error."""


@section
class Xla(Choice):
    """Attention by XLA, with all scores in memory."""


@section
class Sparse(Choice):
    """Attention to live blocks alone, in DeepSpeed's names.

    The layout is made for `model.max_length` tokens; a shorter sequence uses its first
    blocks. A decoder sees no later token.
    """

    pattern: Fixed | Variable | Bigbird | Bslongformer | Local | Dense = Fixed()
    """Live blocks."""
    block: Literal[16, 32, 64, 128] = 64
    """Tokens per side of a block; DeepSpeed's 16 is slower on Hopper GPUs."""


@section
class Latent:
    """Latents of attention: narrow vectors that keys, values and queries come from.

    It is the attention of DeepSeek-V2 and -V3 (arXiv:2405.04434, section 2.1). The
    last `model.positions.size` channels of a head rotate, and all heads share the
    rotating channels of keys.
    """

    key_rank: ranges.SomeWidth = 512
    """Channels of the latent of keys and values."""
    query_rank: ranges.Width = 0
    """Channels of the latent of queries; 0 takes queries from the stream."""
    plain_size: ranges.SomeWidth = 128
    """Channels of a head of queries and keys that do not rotate."""
    value_size: ranges.SomeWidth = 128
    """Channels of a head of values, at most `model.head_size`."""


@section
class SlidingWindow:
    """Bound of the keys that a token sees, in all layers or all but every n-th."""

    size: ranges.SomeTokens = 4_096
    """Keys that a token sees in sliding layers, from its own back."""
    full_attention_every: ranges.Layers = 0
    """Layers that do not slide: every second for 2, as in Gemma 2; none for 0."""
    rope_theta: ranges.NonNegative = 0.0
    """Base of rotary positions in sliding layers, whose rotations are then not scaled;
    0 rotates as in the other layers."""


BalanceScope = Literal["microbatch", "sequence"]


@section
class MoE(Choice):
    """Mixture of experts in place of feed-forward layers.

    Each device routes its tokens of a microbatch.
    """

    num_experts: int | tuple[int, ...] = 8
    """Experts of each MoE layer; one number per MoE layer for a pyramid
    (arXiv:2201.05596)."""
    every: ranges.SomeLayers = 1
    """1 puts experts in every layer, 2 in the second, fourth, ... as DeepSpeed does."""
    first_dense: ranges.Layers = 0
    """Layers without experts before `every` counts."""
    expert_size: ranges.Width = 0
    """Feed-forward width of an expert; 0 takes `model.mlp_size`."""
    num_shared: ranges.Width = 0
    """Experts that all tokens use besides (arXiv:2401.06066)."""
    shared_gate: bool = False
    """Whether a sigmoid of each token scales the output of the shared experts."""
    residual: bool = False
    """Whether a feed-forward of the size of an expert runs beside the experts, and a
    softmax of each token weighs the two (PR-MoE, arXiv:2201.05596)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router: `softmax` over all experts, or `sigmoid` of each."""
    router_bias: bool = False
    """Whether the logits of the router have a bias, as in gpt-oss."""
    scale: ranges.Positive = 1.0
    """Factor of the weights."""
    jitter: ranges.Decay = 0.0
    """Uniform noise of 1 - jitter to 1 + jitter on the router's input while training;
    0.01 in Switch (arXiv:2101.03961)."""
    capacity_factor: ranges.Positive = 1.0
    """Capacity of an expert while training, over an even share of the tokens; with
    `expert_choice` the mean number of experts of a token."""
    eval_capacity_factor: ranges.Positive = 1.0
    """The same in evaluation."""
    min_capacity: ranges.SomeTokens = 4
    """Least capacity, in tokens."""
    z_loss: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Coefficient of the squared log-sum-exp of the logits (arXiv:2202.08906)."""

    @property
    def has_choice_bias(self) -> bool:
        """Whether the scores have a bias for the choice alone."""
        return False


@section
class TokenChoice(MoE):
    """Mixture in which each token chooses `top_k` experts."""

    is_usual = True

    top_k: ranges.SomeWidth = 1
    """Experts of each token."""
    choice_bias: bool = False
    """Whether the scores have a bias for the choice alone even if `bias_rate` is 0, as
    checkpoints of DeepSeek-V3 have: training then leaves it as it is."""
    normalise: bool = True
    """Whether the weights of a token's experts add up to `scale`, if `top_k` > 1."""
    num_groups: ranges.SomeWidth = 1
    """Groups of adjacent experts (arXiv:2412.19437)."""
    top_groups: Annotated[ranges.SomeWidth, ranges.AtMost("num_groups")] = 1
    """Groups that a token may choose from."""
    sampling: Literal["none", "first", "second"] = "none"
    """Gumbel noise on the logits of the `first` choice (DeepSpeed's RSample), or of the
    `second` (GShard), while training."""
    drop: Literal["none", "position", "first_choices", "probability", "random"] = "none"
    """Tokens that stay if more choose an expert than its capacity: all, the first, all
    first choices before second ones, those of the best scores, or a random subset.
    Generation drops none."""
    balance_loss: ranges.NonNegative = 0.01
    """Coefficient of the loss that evens the load of the experts."""
    balance_scope: BalanceScope = "microbatch"
    """Tokens with an even load: those of a device's microbatch, or of each sequence."""
    bias_rate: ranges.NonNegative = 0.0
    """Step of a bias on the scores, which evens the load without a loss: after each
    optimizer step it lowers that of experts above the mean load of the global batch,
    and raises the others' (arXiv:2408.15664). 0 moves none; DeepSeek-V3 took 0.001."""

    @property
    def has_choice_bias(self) -> bool:
        """Whether the scores have a bias for the choice alone."""
        return self.choice_bias or self.bias_rate > 0


@section
class ExpertChoice(MoE):
    """Mixture in which each expert takes its best tokens (arXiv:2202.09368).

    An expert takes as many as its capacity, and loads are equal. It is for training:
    later tokens of a sequence compete with earlier ones, so that the losses of a
    decoder see the future, and a decoder writes no text.
    """


@section
class Model:
    """Shape of the built-in decoder or encoder."""

    kind: Literal["decoder", "encoder"] = "decoder"
    num_layers: ranges.SomeLayers = 12
    embed_size: ranges.SomeWidth = 768
    mlp_size: ranges.Width = 0
    """0 takes 4 times `embed_size`, or 8/3, up to a multiple of 256, for a gated
    `activation`."""
    mlp_tiles: ranges.SomeWidth = 1
    """Tiles of the feed-forward that are loaded, run and updated one after another, for
    layers that do not fit on a device (arXiv:2104.07857, section 5.1.3)."""
    num_heads: ranges.SomeWidth = 12
    num_kv_heads: ranges.Width = 0
    """Fewer than `num_heads` is grouped-query attention, 1 multi-query; 0 takes all."""
    head_size: ranges.Width = 0
    """Channels per head; 0 takes `embed_size` over `num_heads`, or what `latent` and
    `positions.size` add up to."""
    query_key_norm: bool = False
    """Whether `norm` is applied to queries and keys."""
    query_key_norm_scope: Literal["head", "heads"] = "head"
    """Channels that it normalises together: those of each head, or of all heads, as in
    OLMo 2."""
    vocab_size: Annotated[
        int,
        ranges.Range(
            lambda x: x >= 2, "use 2 or more, or 0 to derive it", ranges.MAX_TOKENS
        ),
    ] = 0
    """0 takes that of `data.path`, the 257 of the standard library, or the 50,257 of
    GPT-2."""
    max_length: ranges.SomeTokens = 1_024
    """Longest sequence of this run."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: ranges.Positive = 1e-5
    norm_position: Literal["input", "output", "both"] = "input"
    """What a decoder normalises of attention and feed-forward: the input, or, as OLMo
    2, the output before it is added to the residual stream, or, as Gemma 2, both."""
    zero_centered_norm: bool = False
    """Whether norms multiply by 1 + scale, with scales that start at 0, as in Gemma."""
    positions: Learned | Rotary = Learned()
    num_token_types: Annotated[ranges.Tokens, ranges.NoneAt(0)] = 0
    """Rows of a table for `token_types` of a batch, such as first and second sentence;
    a batch without them has type 0. 0 has no table."""
    window: SlidingWindow | None = None
    attention_soft_cap: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Bound of attention scores, by tanh before the softmax; 0 for none."""
    attention_sinks: bool = False
    """Whether each head has a score besides those of its keys, without a value, that
    takes part of the softmax, as in gpt-oss."""
    logit_soft_cap: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Bound of the logits of the next token; 0 for none."""
    query_scale_size: ranges.Width = 0
    """Number whose root divides attention scores; 0 takes `head_size`."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of `embed_size`."""
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu", "clamped_swiglu"] = (
        "gelu"
    )
    """`gelu` is the form with tanh of GPT-2, `gelu_exact` that of BERT in PyTorch; the
    others are gated, by SiLU, by GELU and by a SiLU of bounded inputs (gpt-oss)."""
    use_bias: bool = True
    """Whether layers have biases."""
    attention_bias: Literal["use_bias", "none", "inputs", "all"] = "use_bias"
    """Biases of attention, if not as `use_bias` says: `inputs` are those of queries,
    keys and values, as in Qwen 2; `all` has that of the output, too."""
    tied_head: bool = True
    """The output matrix is the embedding table."""
    value_head: bool = False
    """Whether a decoder also has a value of each token, a product with the last hidden
    state: the reward of a reward model, or the estimate of a critic."""
    dropout_rate: ranges.Decay = 0.0
    """Dropout of the outputs of attention and feed-forward."""
    embedding_dropout_rate: Annotated[
        float,
        ranges.Range(
            lambda x: x == -1 or 0 <= x < 1, "use 0 or more and less than 1, or -1"
        ),
    ] = -1.0
    """Dropout of the sum of embeddings; -1 takes `dropout_rate`."""
    attention_dropout_rate: ranges.Decay = 0.0
    """Dropout of attention weights; needs them in memory, and so XLA."""
    attention: Auto | Cudnn | Xla | Sparse = Auto()
    """Attention kernel."""
    sequence_attention: Literal["auto", "ulysses", "ring", "halo"] = "auto"
    """Communication of attention over `mesh.sequence`: `ulysses` exchanges tokens for
    heads (arXiv:2309.14509), `ring` passes keys around (arXiv:2310.01889), `halo` sends
    the blocks that sparse attention needs; `auto` takes `ulysses` if heads divide, and
    logs its choice."""
    layers_per_scan: ranges.Layers = 0
    """0 unrolls the layers; k scans over blocks of k layers (compiles faster), as
    `deterministic` and `mlp_chunk_tokens` do with 1."""
    remat: Literal[
        "none", "elementwise", "attention_and_mlp", "dots", "attention", "full"
    ] = "elementwise"
    """What the backward pass recomputes; see `zjax.ops.remat`."""
    activation_memory: Literal["device", "pinned_host", "nvme"] = "device"
    """Memory of the saved activations until the backward pass. If blocks are separate
    programs, as under offload, it stores their inputs and needs `remat="full"`; `nvme`
    needs such blocks."""
    loss_chunk_tokens: ranges.Natural = 4_096
    """Tokens whose logits exist at one time; 0 computes them all at once."""
    mlp_chunk_tokens: ranges.Natural = 0
    """Tokens on a device whose hidden values in a feed-forward exist at one time; 0
    takes all. The sequence axis and the tensor axis both split tokens. For long
    sequences, under a `remat` that recomputes these values: `full` or `attention`
    (arXiv:2506.13996, section 3.1)."""
    z_loss: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Weight of the squared log-partition penalty."""
    latent: Latent | None = None
    moe: TokenChoice | ExpertChoice | None = None

    __post_init__ = derived.fill_sizes

    @property
    def is_gated(self) -> bool:
        """Whether a product of two matrices enters the last one of a feed-forward."""
        return self.activation in ("swiglu", "geglu", "clamped_swiglu")

    @property
    def value_size(self) -> int:
        """Channels of a head of values."""
        return self.latent.value_size if self.latent else self.head_size

    @property
    def attention_kernel(self) -> Literal["auto", "cudnn", "xla"]:
        """Kernel of dense attention."""
        match self.attention:
            case Cudnn():
                return "cudnn"
            case Xla():
                return "xla"
            case _:
                return "auto"

    @property
    def bias_rate(self) -> float:
        """Step of the router biases, which evens loads; 0 if none moves."""
        return self.moe.bias_rate if isinstance(self.moe, TokenChoice) else 0.0

    @property
    def window_size(self) -> int:
        """Keys that a token sees in sliding layers; 0 for all."""
        return self.window.size if self.window else 0

    @property
    def rotary(self) -> Rotary:
        """Settings of rotary positions; the defaults for learned positions."""
        return self.positions if isinstance(self.positions, Rotary) else Rotary()

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0 without a table."""
        if isinstance(self.positions, Rotary):
            return 0
        return self.positions.first + self.max_length

    @property
    def has_input_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        given = self.attention_bias
        return self.use_bias if given == "use_bias" else given in ("inputs", "all")

    @property
    def has_output_bias(self) -> bool:
        """Whether the output of attention has a bias."""
        given = self.attention_bias
        return self.use_bias if given == "use_bias" else given == "all"

    @property
    def embedding_dropout(self) -> float:
        """Dropout of the sum of embeddings."""
        given = self.embedding_dropout_rate
        return self.dropout_rate if given == -1 else given

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of blocks are stored off the devices for the backward pass."""
        return self.activation_memory != "device"


@section
class Masking:
    """Tokens that an encoder predicts (arXiv:1810.04805), chosen anew in each step.

    80 % of the predicted tokens are hidden, 10 % become random tokens, and 10 % stay.
    """

    fraction: ranges.Share = 0.15
    """Share of the tokens that are predicted."""
    mask_id: ranges.OpenTokens = -1
    """Token that hides others; -1 takes `[MASK]` or `<mask>` of the tokenizer, or the
    first id beyond its vocabulary."""


@section
class Data:
    """Where tokens come from."""

    source: Literal["standard_library", "tokens", "synthetic"] = "standard_library"
    """Python's own source on this machine, files of `zjax data prepare`, or noise."""
    path: str = ""
    """Directory made by `zjax data prepare`, for `tokens`."""
    length: ranges.Tokens = 0
    """Tokens per sequence; 0 takes `model.max_length`."""
    packing: Literal["blocks", "documents"] = "blocks"
    """`documents` keeps attention inside each document by segment ids."""
    num_workers: ranges.Workers = 0
    """Loader processes; 0 reads in a thread of this process."""
    prefetch_batches: ranges.Workers = 2
    """Batches placed on the devices ahead of their use."""
    check_ids: Literal["host", "device"] = "host"
    """Where token ids are checked against the vocabulary: as batches leave the host, or
    also on the devices, for which each step then waits."""
    masking: Masking = Masking()


@section
class Growing(Choice):
    """Pacing from a first value to a last one."""

    start: ranges.PacedValue = 0
    """First value; 0 takes 64 tokens, or a difficulty of 1."""
    end: ranges.PacedValue = 0
    """Last value; 0 takes `data.length`, 100 percent, or the largest difficulty."""
    num_steps: ranges.Count = 1_000
    """First step of the last value."""
    num_tokens: ranges.Natural = 0
    """Consumed tokens that end the growth in place of `num_steps`: the step that
    reaches them is the first of the last value. 0 counts steps."""
    multiple: ranges.PacedValue = 0
    """Values are multiples of it; 0 takes 64 tokens, or 1."""


@section
class LinearPacing(Growing):
    """Number that grows in proportion to the step."""

    kind: ClassVar[str] = "linear"


@section
class RootPacing(Growing):
    """Number that grows with a root of the step, which rises fast at first."""

    kind: ClassVar[str] = "root"
    degree: Annotated[int, ranges.at_least(1, 64)] = 2
    """2 is the square root."""


@section
class DiscretePacing(Choice):
    """Listed numbers."""

    kind: ClassVar[str] = "discrete"
    values: tuple[int, ...] = ()
    """Values, ascending."""
    last_steps: tuple[int, ...] = ()
    """Last step of each value but the last."""


@section
class CustomPacing(Choice):
    """Number that a function of yours returns."""

    kind: ClassVar[str] = "custom"
    num_steps: ranges.Count = 1_000
    """First step of the last value."""
    function: str = ""
    """`module:function` from a step to a value, an int that never falls."""


Pacing = LinearPacing | RootPacing | DiscretePacing | CustomPacing
"""How a number grows over the steps (arXiv:2212.03597, section 3.1)."""


@section
class SequenceWarmup(Choice):
    """Shorter contexts in the first steps."""

    pacing: Pacing = LinearPacing()
    """Tokens per sequence, or that a token sees with those before it."""

    __post_init__ = derived.fill_length_pacing


@section
class Truncate(SequenceWarmup):
    """Cuts the end off each sequence; each length is compiled."""


@section
class Reshape(SequenceWarmup):
    """Cuts each sequence into short sequences; each length is compiled.

    Batches have more rows and about as many tokens.
    """


@section
class Window(SequenceWarmup):
    """Limits how far back a token sees: one program trains on all tokens."""


@section
class CurriculumMetric:
    """A measure of the samples, and how its difficulty grows."""

    index: str = ""
    """File of `zjax data analyze`, made from the same data."""
    difficulty: Literal["percentile", "value"] = "percentile"
    """`percentile` admits equally many samples per unit of difficulty, `value` those
    whose value is at most the difficulty."""
    pacing: Pacing = LinearPacing()
    """Difficulties, the last of which is 100 percent or the largest value."""

    __post_init__ = derived.fill_difficulty_pacing


@section
class Curriculum:
    """Easy samples first (arXiv:2212.03597)."""

    metrics: tuple[CurriculumMetric, ...] = ()
    """A sample is drawn once all of them admit it; () draws all samples."""


@section
class Shuffle(Choice):
    """Takes each batch of an epoch once."""


@section
class Weighted(Choice):
    """Order with odds of the buckets."""

    weights: tuple[float, ...] = ()
    """Odds of the buckets, the shortest first; () for 1, 1/2, 1/4, ... under `grow`,
    and equal ones otherwise."""


@section
class Grow(Weighted):
    """Takes each batch of an epoch once, in cycles that begin with short rows."""

    num_cycles: ranges.SomeRows = 8
    """Equal parts of an epoch."""


@section
class Mixture(Weighted):
    """Draws buckets by `weights`."""


@section
class Paced(Weighted):
    """Draws buckets that are not longer than `pacing` says."""

    kind: ClassVar[str] = "pacing"
    pacing: Pacing = LinearPacing()
    """Tokens of the longest bucket."""


@section
class Buckets(Choice):
    """Batches of one length each and a constant number of tokens."""

    shortest: ranges.SomeTokens = 256
    """Tokens per row of the shortest bucket; each next one is twice as long, up to
    `data.length`."""
    order: Shuffle | Grow | Mixture | Paced = Shuffle()
    """Order of the batches."""
    learning_rate: Literal["constant", "linear", "sqrt"] = "constant"
    """Whether the learning rate of a batch grows with its rows over
    `global_batch_size`, or with the square root."""

    __post_init__ = derived.fill_bucket_pacing


@section
class Cut(Buckets):
    """Splits documents into powers of two, without padding."""


@section
class Pad(Buckets):
    """Takes documents whole, in the shortest bucket that holds them."""


@section
class RandomLTD(Choice):
    """Layers that train on a growing random subset of the tokens."""

    pacing: Pacing = LinearPacing(num_steps=0)
    """Tokens of each sequence that they train on, from 128 by default, in multiples of
    128; each number is compiled. `num_steps=0` takes all steps."""

    __post_init__ = derived.fill_kept_pacing


@section
class Layerwise(RandomLTD):
    """Draws tokens for each layer."""


@section
class Span(RandomLTD):
    """Draws tokens once for all layers (arXiv:2501.04765), which is cheaper."""


@section
class LayerDrop:
    """Progressive layer drop (arXiv:2010.13369), for decoders.

    In step t, from 0, layer l of L trains with the probability 1 - l / L (1 - theta_t),
    with theta_t = theta + (1 - theta) exp(-gamma t). The probability divides the output
    of a layer that runs. One draw decides for all sequences of a microbatch.
    """

    theta: Annotated[
        float, ranges.Range(lambda x: 0 < x < 1, "use more than 0 and less than 1")
    ] = 0.5
    """Limit of the probability of the last layer, as in the paper."""
    gamma: ranges.NonNegative = 0.0
    """Rate at which probabilities fall; 0 takes 100 / `num_steps`, as the paper."""

    def rate(self, total: int) -> float:
        """Rate at which probabilities fall, out of all steps of a run."""
        # The paper's default: probabilities settle after a few percent of the run.
        return self.gamma or 100 / total


@section
class EarlyStopping:
    """End of a run whose validation loss no longer falls."""

    patience: ranges.Count = 3
    """Evaluations in a row without a lower loss that end the run."""
    min_improvement: ranges.NonNegative = 0.0
    """Least decrease of the best loss that counts as lower."""


@section
class Evaluation:
    """Loss on held-out data during training."""

    every_steps: ranges.Natural = 500
    """0 evaluates only at the end."""
    num_batches: Annotated[int, ranges.at_least(-1)] = 8
    """Most batches of `global_batch_size` rows, the same for every seed and each row
    once; -1 takes all rows, and 0 never evaluates."""
    early_stopping: EarlyStopping | None = None


@section
class Checkpoint:
    """Checkpoints under `<directory>/checkpoints`."""

    every_steps: ranges.Natural = 500
    """0 saves only at the end and on a signal."""
    keep_last: ranges.Count = 2
    keep_best: ranges.Natural = 1
    """Checkpoints of lowest validation loss to keep besides the last. With
    `evaluation.early_stopping` a run also saves at each new lowest loss."""
    resume: Literal["auto", "never", "required"] = "auto"
    """Whether to continue a run found in the directory."""
    init_from: str = ""
    """Safetensors file, or directory of a run or of a Hugging Face checkpoint, whose
    weights start a new run; those of a dense model also start one with `model.moe`,
    whose experts are copies (arXiv:2212.05055)."""
    expert_noise: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Noise on these copies, as a fraction of the standard deviation of each matrix."""
    resize_vocabulary: Annotated[bool, ranges.NoneAt(False)] = False
    """Whether `init_from` has fewer tokens than `model.vocab_size`; the new rows of its
    tables are the mean of the others."""


@section
class Codes(Choice):
    """Codes of frozen matrices, with scales in the compute dtype."""

    block_size: Annotated[int, ranges.at_least(2)] = 64
    """Most inputs that share a scale, for each output of a matrix: blocks are as large
    as divide its inputs, such as 40 of heads of 80 channels."""


@section
class Int8(Codes):
    """One byte per weight."""


@section
class Int4(Codes):
    """Half a byte per weight."""


@section
class Lora:
    """Low-rank adapters, the only parameters to train (LoRA, arXiv:2106.09685).

    All other parameters are frozen: stored once, in the compute dtype. Adapters are the
    parameters `lora/a` and `lora/b` of a layer, and `optimizer.groups` finds them so.
    """

    rank: ranges.Count = 8
    """Inner dim of the adapters."""
    alpha: ranges.Positive = 16.0
    """Adapters are multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = (".*",)
    """Regular expressions searched in paths of linear layers, such as
    `blocks/attention/query`."""
    form: Literal["lora", "dora"] = "lora"
    """`dora` also trains the length of each column of the sum of matrix and adapter
    (arXiv:2402.09353)."""
    dropout: ranges.Decay = 0.0
    """Probability to zero an entry of what enters an adapter alone, in training."""
    also_train: tuple[str, ...] = ()
    """Regular expressions searched in paths of other parameters to train in full."""
    init_from: str = ""
    """Directory in PEFT's layout whose adapters start the run, beside the weights of
    `checkpoint.init_from`; empty for new ones."""
    quantize: Int8 | Int4 | None = None
    """Type in which the frozen matrices of blocks are stored (QLoRA, arXiv:2305.14314);
    None for the compute dtype."""


@section
class Distill:
    """Staged distillation from a trained decoder (MoS, arXiv:2201.05596).

    The divergence of teacher and student is added to the loss until the stage ends.
    """

    teacher: str = ""
    """Directory of the teacher's run, whose newest weights for evaluation are used; or
    of outcomes that `zjax data teach` has stored."""
    divergence: (
        distillation.ForwardKl | distillation.ReverseKl | distillation.JensenShannon
    ) = distillation.ForwardKl()
    """Divergence of the next token's distribution."""
    weight: ranges.Positive = 1.0
    """Weight of the divergence beside the cross-entropy."""
    temperature: ranges.Positive = 1.0
    """Divisor of the logits of both (arXiv:1503.02531)."""
    fraction: ranges.Fraction = 0.7
    """Fraction of `num_steps` after which the stage ends."""
    hidden: distillation.HiddenStates | None = None
    attention: distillation.AttentionMaps | None = None
    memory: Literal["device", "pinned_host"] = "device"
    """Memory of the teacher's parameters between its passes."""

    def num_steps(self, total: int) -> int:
        """Steps of the stage, out of all steps of a run."""
        return round(self.fraction * total)


@section
class Profile:
    """Trace of some steps by jax.profiler, under `<directory>/trace`."""

    start_step: Annotated[ranges.Count, ranges.AtMost("config.num_steps")] = 10
    """First step of the trace, from 1 on."""
    num_steps: ranges.Count = 3


@section
class Observe:
    """Metrics, plots and profiles of a run."""

    sinks: tuple[
        Literal["console", "jsonl", "csv", "tensorboard", "wandb", "mlflow"], ...
    ] = ("console", "jsonl", "tensorboard")
    project: str = "zjax"
    """Project of Weights & Biases, and experiment of MLflow."""
    log_every_steps: ranges.Count = 10
    plot: bool = True
    """Saves a picture of loss and speed at the end."""
    profile: Profile | None = None
    peak_tflops: ranges.NonNegative = 0.0
    """Peak of one device for MFU; 0 looks it up by device name."""


@section
class Processes:
    """How the processes of a run find each other."""

    coordinator: str = "auto"
    """`auto` asks Slurm, Open MPI or Kubernetes; `none` runs alone; or `host:port`."""
    num_processes: Annotated[ranges.Devices, ranges.NoneAt(0)] = 0
    """Number of processes, with `host:port`."""
    process_id: Annotated[
        int, ranges.at_least(-1, ranges.MAX_DEVICES), ranges.NoneAt(-1)
    ] = -1
    """Number of this process, with `host:port`."""
    heartbeat_seconds: Annotated[int, ranges.at_least(1, 86_400)] = 20
    """Seconds without a heartbeat after which a process counts as dead."""


@section
class Elasticity:
    """Batch sizes that many numbers of devices divide, as DeepSpeed computes them.

    The number of batch shards, which are the devices of one model, may then change from
    start to start while the global batch stays.
    """

    microbatch_sizes: tuple[int, ...] = (2, 4, 6)
    """Sizes to choose `microbatch_size` from, in place of the three settings above."""
    max_batch_size: ranges.SomeRows = 2_000
    """Largest global batch."""
    min_shards: ranges.SomeDevices = 1
    max_shards: ranges.SomeDevices = 10_000
    """Range of the numbers of batch shards of which as many as possible shall fit."""
    prefer_larger: bool = True
    """Whether the larger of two batches that fit equally many is taken."""
    shards_per_node: ranges.Devices = 0
    """0 counts shards (version 0.1). A number of devices counts nodes (version 0.2),
    and gives shards that do not fit a batch of their own."""


@section
class Config:
    """One run of zjax."""

    seed: ranges.Seed = 0
    num_steps: ranges.Count = derived.OfferedInt(1_000)
    num_epochs: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Passes over the training rows, which `zjax.Trainer` counts, in place of
    `num_steps`; 0 is none."""
    num_tokens: Annotated[ranges.Natural, ranges.NoneAt(0)] = 0
    """Consumed tokens that end the run of a built-in model before `num_steps`, at the
    end of a step; 0 is none."""
    global_batch_size: ranges.Rows = derived.OfferedInt(32)
    """Sequences per optimizer step, over all devices and microbatches; 0 derives it
    from the two settings below. The batch of `zjax.initialize` replaces the default."""
    num_microbatches: ranges.Rows = 0
    """Gradient accumulation steps; 0 derives it (1 by default)."""
    microbatch_size: ranges.Rows = 0
    """Sequences per device and microbatch; 0 derives it."""
    elasticity: Elasticity | None = None
    directory: str = "runs/default"
    """Output directory of the run."""
    deterministic: bool = False
    """Whether GPU runs repeat bit for bit, with slower kernels; CPU runs always do."""
    xla_options: tuple[str, ...] = ()
    """Compiler options `name=value` that add to and replace those that zjax derives."""
    mesh: Mesh = Mesh()
    pipeline: OneFOneB | Gpipe | Interleaved | ZbH1 = OneFOneB()
    """Schedule of the stages of `mesh.pipeline`."""
    zero: Zero = Zero()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    communication: Communication = Communication()
    model: Model = Model()
    data: Data = Data()
    sequence_warmup: Truncate | Reshape | Window | None = None
    """Shorter contexts in the first steps (arXiv:2108.06084, arXiv:2503.15450). They
    keep large batches and learning rates stable, and cost less. The rate decays with
    the tokens that were consumed, not with the steps."""
    curriculum: Curriculum = Curriculum()
    buckets: Cut | Pad | None = None
    """Batches of one length each and a constant number of tokens (arXiv:2405.13226). No
    row holds two documents. `global_batch_size` is the rows of the longest bucket;
    evaluation sees rows of `data.length`."""
    random_ltd: Layerwise | Span | None = None
    """Random token dropping (random-LTD, arXiv:2211.11586): layers between the first
    and the last train on a growing random subset of the tokens of each sequence. Tokens
    pass by, unchanged, each layer that drops them. Where blocks have several layers
    (`model.moe.every`), the first and the last block train on all tokens."""
    layer_drop: LayerDrop | None = None
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    lora: Lora | None = None
    quantize: quantization.Quantize | None = None
    """Rules by which training rounds matrices and activations in the forward pass, so
    that the run learns the values of the codes (quantisation-aware training,
    arXiv:1712.05877)."""
    prune: pruning.Prune | None = None
    distill: Distill | None = None
    preference: (
        preferences.Dpo
        | preferences.Hinge
        | preferences.Ipo
        | preferences.ApoZero
        | preferences.Simpo
        | preferences.Orpo
        | preferences.Kto
        | preferences.RewardModel
        | None
    ) = None
    """Objective on completions of prompts, in place of the likelihood of texts:
    `data.path` holds examples of `zjax data prepare --examples`."""
    rl: reinforcement.Rl | None = None
    """Reinforcement learning by `zjax rl`, in place of training on the texts of
    `data`."""
    compress: compression.Compress | None = None
    """Quantisation of trained weights by `zjax compress`."""
    observe: Observe = Observe()
    processes: Processes = Processes()

    __post_init__ = derived.fill_from_each_other
