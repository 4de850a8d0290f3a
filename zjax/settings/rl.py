"""Settings of reinforcement learning: texts, rewards, objective and reference."""

from typing import Annotated, ClassVar, Literal

from zjax.settings import ranges
from zjax.settings.choices import Choice, section


@section
class Rollout:
    """Texts that the run draws from its weights, and then learns from.

    Tokens are drawn from the whole distribution: log-probabilities of a distribution
    cut by top-k or top-p would not be the policy's.
    """

    num_prompts: ranges.SomeRows = 64
    """Prompts of a rollout, each of which starts a group of texts."""
    num_samples: ranges.SomeRows = 8
    """Texts of a prompt, whose rewards are compared."""
    max_refills: ranges.Refills = 0
    """Most further rollouts of a step, which replace groups of equal rewards (dynamic
    sampling of DAPO); 0 keeps these groups, from which nothing is learned."""
    max_new_tokens: ranges.SomeTokens = 512
    """Most tokens of a text, the end token included; a longer text is truncated."""
    temperature: ranges.Positive = 1.0
    """Divisor of the logits, in the rollout and in the loss."""


@section
class Reward(Choice):
    """Judge of texts."""

    named_by: ClassVar[str]
    """Setting whose value names the reward in metrics."""
    weight: float = 1.0
    """Factor of the reward in the sum of all rewards."""

    @property
    def name(self) -> str:
        """Name of the reward in metrics."""
        return getattr(self, self.named_by)


@section
class FunctionReward(Reward):
    """Function `reward(prompt, completion, **row)` in worker processes.

    It returns a number, or None for a text that it cannot score.
    """

    is_usual = True
    kind: ClassVar[str] = "function"
    named_by: ClassVar[str] = "function"
    function: str = ""
    """`module:function`, which worker processes import."""


@section
class RunReward(Reward):
    """Reward model of a run, on the devices of the policy; reads the newest weights."""

    kind: ClassVar[str] = "run"
    named_by: ClassVar[str] = "directory"
    directory: str = ""
    """Directory of a run whose model has values, as of `preference=reward_model`."""
    memory: Literal["device", "pinned_host"] = "device"
    """Memory of the weights between passes."""


@section
class Overlong(Choice):
    """Treatment of texts that `rollout.max_new_tokens` cuts."""


@section
class Keep(Overlong):
    """Learns from them as from all texts."""


@section
class Mask(Overlong):
    """Learns nothing from them; they count in the mean of their group."""


@section
class Penalise(Overlong):
    """Adds a penalty, 0 at `margin` tokens before the limit and -1 at the limit.

    The soft overlong punishment of DAPO (arXiv:2503.14476), equation 13.
    """

    margin: ranges.Tokens = 0
    """Tokens before the limit over which the penalty grows; 0 takes a fifth of
    `rollout.max_new_tokens`, as the paper."""


@section
class Objective(Choice):
    """Recipe of the loss of a rollout."""

    ratio: ClassVar[Literal["tokens", "sequences"]] = "tokens"
    """Unit of the ratios of new to old probabilities."""
    ratio_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that act only after the first update on a rollout."""
    entropy_weight: ranges.NonNegative = 0.0
    """Weight of the policy's entropy in nats, by which the loss of a token falls."""


@section
class Clipped(Objective):
    """Objective that clips ratios."""

    paper_clip: ClassVar[tuple[float, float]] = 0.2, 0.2
    ratio_settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "max_ratio")
    clip_low: ranges.Fraction = 0.0
    """Distance of the lowest unclipped ratio from 1; 0 takes the paper's: 0.2, and
    0.0003 in `gspo`."""
    clip_high: ranges.NonNegative = 0.0
    """Distance of the highest unclipped ratio from 1; 0 takes the paper's: 0.2, 0.28 in
    `dapo`, and 0.0004 in `gspo`."""
    max_ratio: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Largest ratio for negative advantages, above 1 (dual clip, arXiv:1912.09729); 0
    is no limit."""

    @property
    def clip(self) -> tuple[float, float]:
        """Distances of the lowest and of the highest unclipped ratio from 1."""
        low, high = self.paper_clip
        return self.clip_low or low, self.clip_high or high


@section
class Grouped(Objective):
    """Objective whose advantages compare the texts of one prompt."""

    paper_baseline: ClassVar[str] = "group_std"
    paper_aggregation: ClassVar[str] = "sequence_mean"
    baseline: Literal["paper", "group_std", "group_mean", "leave_one_out"] = "paper"
    """Advantage of a text: reward less the mean of its group, over the standard
    deviation or not, or reward less the mean of the other texts."""
    aggregation: Literal["paper", "token_mean", "sequence_mean", "constant"] = "paper"
    """Mean over the tokens of all texts; mean over texts of means over tokens; or sum
    over tokens, divided by texts and by `rollout.max_new_tokens`."""
    normalise_each: bool = False
    """Whether each reward is normalised in its group before the weighted sum (GDPO,
    arXiv:2601.05242), in place of the sum."""
    max_sampler_gap: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Largest mean gap in nats per token, from the sampler down to the policy, of a
    text of negative advantage that is learned from (off-policy sequence mask,
    arXiv:2512.02556); 0 is no limit."""

    @property
    def chosen_baseline(self) -> str:
        """Baseline as set, or of the paper."""
        return self.paper_baseline if self.baseline == "paper" else self.baseline

    @property
    def chosen_aggregation(self) -> str:
        """Aggregation as set, or of the paper."""
        chosen = self.aggregation
        return self.paper_aggregation if chosen == "paper" else chosen


@section
class Grpo(Grouped, Clipped):
    """Group relative policy optimization (arXiv:2402.03300)."""

    is_usual = True


@section
class DrGrpo(Grouped, Clipped):
    """GRPO without the biases of lengths and standard deviations (arXiv:2503.20783)."""

    paper_baseline: ClassVar[str] = "group_mean"
    paper_aggregation: ClassVar[str] = "constant"


@section
class Dapo(Grouped, Clipped):
    """GRPO with a higher upper clip and a mean over tokens (arXiv:2503.14476).

    The paper also sets `rollout.max_refills` and `overlong`.
    """

    paper_clip: ClassVar[tuple[float, float]] = 0.2, 0.28
    paper_aggregation: ClassVar[str] = "token_mean"


@section
class Gspo(Grouped, Clipped):
    """Clips ratios of sequences in place of tokens (arXiv:2507.18071)."""

    ratio: ClassVar[Literal["tokens", "sequences"]] = "sequences"
    paper_clip: ClassVar[tuple[float, float]] = 3e-4, 4e-4


@section
class Cispo(Grouped):
    """Bounds the weight of a token, never the update (arXiv:2506.13585)."""

    ratio_settings: ClassVar[tuple[str, ...]] = ("max_weight",)
    paper_aggregation: ClassVar[str] = "token_mean"
    max_weight: ranges.Positive = 5.0
    """Largest weight of a token."""


@section
class Sapo(Grouped):
    """Fades the gradient of ratios far from 1 (arXiv:2511.20347)."""

    ratio_settings: ClassVar[tuple[str, ...]] = (
        "positive_temperature",
        "negative_temperature",
    )
    positive_temperature: ranges.Positive = 1.0
    """Sharpness of the gate for positive advantages."""
    negative_temperature: ranges.Positive = 1.05
    """Sharpness of the gate for negative advantages."""


@section
class Rloo(Grouped):
    """REINFORCE with the mean of the other texts as baseline (arXiv:2402.14740)."""

    paper_baseline: ClassVar[str] = "leave_one_out"
    paper_aggregation: ClassVar[str] = "constant"


@section
class Returns(Clipped):
    """Objective whose advantages are of tokens, whitened over the rollout."""

    discount: ranges.Fraction = 1.0
    """Factor of a reward per token that it lies ahead."""


@section
class ReinforcePp(Returns):
    """REINFORCE++: discounted returns without a critic (arXiv:2501.03262)."""


@section
class Ppo(Returns):
    """Proximal policy optimization with a critic (arXiv:1707.06347)."""

    ratio_settings: ClassVar[tuple[str, ...]] = (
        *Clipped.ratio_settings,
        "value_clip",
    )
    gae_lambda: ranges.Fraction = 0.95
    """Factor of an error of the critic per token that it lies ahead
    (arXiv:1506.02438)."""
    value_weight: ranges.Positive = 0.1
    """Weight of the loss of values beside the policy's, where blocks are shared."""
    value_clip: ranges.Limit = 0.2
    """Largest change of a value that the critic's loss rewards; inf for no limit."""


@section
class Correction(Choice):
    """Weights of tokens that the trainer finds more or less likely than the sampler."""

    unit: Literal["tokens", "sequences"] = "tokens"
    """Whether a token or a sequence has a weight."""


@section
class Truncate(Correction):
    """Limits weights (truncated importance sampling)."""

    max_weight: ranges.Positive = 2.0
    """Largest weight of a token or sequence."""


@section
class Drop(Correction):
    """Learns nothing where the weight is out of range (masked importance sampling)."""

    min_weight: ranges.NonNegative = 0.5
    """Smallest weight that counts."""
    max_weight: ranges.Positive = 2.0
    """Largest weight of a token or sequence."""


@section
class Reference(Choice):
    """Divergence from a policy that does not learn."""

    coefficient: ranges.Positive = 0.001
    """Weight of the divergence, in nats per token."""
    memory: Literal["device", "pinned_host"] = "device"
    """Memory of the reference's parameters between its passes. With `lora` the
    reference is the model without adapters, and has no parameters besides."""


@section
class InLoss(Reference):
    """Adds the divergence to the loss of each token."""

    is_usual = True
    kind: ClassVar[str] = "loss"
    estimator: Literal["k2", "k3", "k3_k2"] = "k3"
    """k2 has the gradient of the reverse divergence, k3 the value, and k3_k2 both. k1
    has a gradient of mean zero, and is none of them."""


@section
class InReward(Reference):
    """Takes the divergence of each token (k1) off the reward of the token."""

    kind: ClassVar[str] = "reward"


@section
class Pretraining:
    """Loss of pre-training on `data` beside the objective (arXiv:2203.02155, eq. 2)."""

    weight: ranges.Positive = 1.0
    """Factor of the mean loss of a token of `data`, in nats."""
    num_rows: ranges.Rows = 0
    """Rows of `data.length` tokens in a step; 0 takes `global_batch_size`, a row beside
    each text."""


@section
class Critic(Choice):
    """Model of the values that `ppo` learns."""


@section
class Shared(Critic):
    """A head on the blocks of the policy, which starts at 0."""


@section
class Own(Critic):
    """A second model of the policy's shape, with a separate optimizer.

    The critic has the mesh, the ZeRO stage, the memories and the precision of the
    policy.
    """

    init_from: str = ""
    """Run or files of weights to start from, such as a reward model of
    `preference=reward_model`; empty takes the weights that the policy starts from."""
    peak_learning_rate: Annotated[ranges.NonNegative, ranges.NoneAt(0)] = 0.0
    """Learning rate of the critic; 0 takes `optimizer.peak_learning_rate`."""


@section
class Rl:
    """Reinforcement learning by `zjax rl`, in place of training on `data`.

    A step trains on `global_batch_size` texts, by default on a whole rollout. Texts are
    packed into rows of `data.length` tokens.
    """

    prompts: str = ""
    """JSON Lines of prompts: `prompt` or `messages`, and fields for the rewards."""
    evaluation_prompts: str = ""
    """JSON Lines of prompts held out, for the evaluation; empty for none."""
    evaluation_samples: ranges.Count = 1
    """Texts of each prompt in an evaluation: pass@1 is the mean, and pass@k counts a
    prompt that any text solves."""
    rollout: Rollout = Rollout()
    rewards: tuple[FunctionReward | RunReward, ...] = ()
    """Judges, whose weighted sum is the reward of a text."""
    reward_seconds: ranges.Positive = 10.0
    """Seconds after which a call of a reward function is stopped, and its text left
    unscored."""
    reward_processes: ranges.Workers = 0
    """Processes that call the reward functions; 0 takes one per core, at most 8."""
    num_epochs: ranges.Count = 1
    """Times that the run learns from each text."""
    objective: Grpo | DrGrpo | Dapo | Gspo | Cispo | Sapo | Rloo | ReinforcePp | Ppo = (
        Grpo()
    )
    """Recipe of the loss."""
    critic: Shared | Own = Shared()
    """Model of the values that `ppo` learns."""
    overlong: Keep | Mask | Penalise = Keep()
    """Treatment of texts that `rollout.max_new_tokens` cuts."""
    correction: Truncate | Drop | None = None
    """Weights for the difference between sampler and trainer; None for none."""
    reference: InLoss | InReward | None = None
    """Divergence from the weights of `checkpoint.init_from`; None for none."""
    pretraining: Pretraining | None = None
    """Loss of pre-training on `data` in each step; None for none."""

    @property
    def has_values(self) -> bool:
        """Whether the policy itself has a head of values."""
        return isinstance(self.objective, Ppo) and isinstance(self.critic, Shared)

    @property
    def num_texts(self) -> int:
        """Texts of a rollout."""
        return self.rollout.num_prompts * self.rollout.num_samples

    def num_updates(self, global_batch_size: int) -> int:
        """Optimizer steps on each rollout."""
        return self.num_epochs * (self.num_texts // global_batch_size)
