"""Steps of GRPO on a Llama of random weights, by TRL.

python examples/benchmarks/rl_trl.py [--shape=1p5b] [--checkpointing]
    [--max_requests=128] [--max_seconds=300]

Texts are written by transformers' continuous batching, which casts weights to bfloat16
for all that follows. A step is timed from the first text to the last updated weight.
"""

import dataclasses
import tempfile
import time

import call_timing
import rl_cases as cases
import timing
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
FEW_PAGES = {"max_memory_percent": 0.01}
"""On a CPU, whose memory others use; on a GPU TRL takes the half of what is free."""


def make_tokenizer(vocab_size):
    """A tokenizer of decimal numbers, of which the last ends a text."""
    words = {str(number): number for number in range(vocab_size)}
    library = Tokenizer(models.WordLevel(words, unk_token="0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token="0", eos_token=str(vocab_size - 1)
    )


def make_model(shape):
    """A Llama of random weights in bfloat16, with a tied head."""
    config = LlamaConfig(
        **shape.settings(),
        bos_token_id=None,
        eos_token_id=shape.vocab_size - 1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def settle():
    """Waits for the device; returns the time."""
    if IS_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps(TrainerCallback):
    """Notes how long steps take, and rollouts among them.

    Args:
        num_untimed: First steps, which do not count.
        max_seconds: Seconds of all steps after which none begins, if one has counted.
    """

    def __init__(self, num_untimed, max_seconds):
        self.step_seconds, self.rollout_seconds, self.num_tokens = [], [], []
        self._num_untimed, self._max_seconds = num_untimed, max_seconds
        self._start = 0.0

    def on_step_begin(self, *args, **options):
        self._start = settle()

    def on_step_end(self, args, state, control, **options):
        self.step_seconds.append(settle() - self._start)
        cases.progress(f"a step took {self.step_seconds[-1]:.2f} s")
        if len(self.step_seconds) > self._num_untimed:
            control.should_training_stop |= sum(self.step_seconds) > self._max_seconds

    def describe(self, num_texts):
        """Metrics of the steps that count, each of a number of texts."""
        seconds = self.step_seconds[self._num_untimed :]
        return {
            "step_seconds": timing.spread(seconds),
            "rollout_seconds": timing.spread(self.rollout_seconds[self._num_untimed :]),
            "texts_per_second": call_timing.rates(num_texts, seconds),
            "new_tokens": self.num_tokens[-1],
        }


class TimedTrainer(GRPOTrainer):
    """A trainer that tells `steps` how long a rollout takes."""

    steps: Steps

    def _generate_single_turn(self, *args, **options):
        start = settle()
        found = super()._generate_single_turn(*args, **options)
        self.steps.rollout_seconds.append(settle() - start)
        self.steps.num_tokens.append(sum(map(len, found[0])))
        cases.progress(f"a rollout took {self.steps.rollout_seconds[-1]:.2f} s")
        return found


def reward(prompts, completions, **fields):
    """Rewards of texts, as zjax has them."""
    return [cases.reward("", completion) for completion in completions]


def batching(max_requests):
    """Settings of continuous batching besides those that TRL chooses."""
    settings = {} if IS_CUDA else dict(FEW_PAGES)
    return settings | ({"max_requests_per_batch": max_requests} if max_requests else {})


def make_arguments(workload, given, directory):
    """Arguments of a trainer, without checkpoints and reports."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=given.num_warm_ups + given.num_steps,
        per_device_train_batch_size=workload.microbatch_size,
        gradient_accumulation_steps=workload.num_texts // workload.microbatch_size,
        num_generations=workload.num_samples,
        max_completion_length=workload.num_new,
        temperature=workload.temperature,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=batching(given.max_requests),
        loss_type="grpo",
        beta=0.0,
        learning_rate=cases.LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=given.checkpointing,
        bf16=True,
        use_cpu=not IS_CUDA,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
    )


def main() -> None:
    parser = cases.make_parser("1p5b")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--max_seconds", type=float, default=300.0)
    parser.add_argument("--max_requests", type=int, default=0, help="0: TRL's choice")
    parser.set_defaults(microbatch_size=16)
    given = parser.parse_args()
    workload = cases.workload_of(given)
    shape = dataclasses.replace(cases.SHAPES[given.shape], length=workload.length)
    number = given.num_warm_ups + given.num_steps
    prompts = workload.prompts(shape.vocab_size, number)
    steps = Steps(given.num_warm_ups, given.max_seconds)
    with tempfile.TemporaryDirectory() as directory:
        trainer = TimedTrainer(
            model=make_model(shape),
            reward_funcs=reward,
            args=make_arguments(workload, given, directory),
            train_dataset=Dataset.from_list([{"prompt": x} for x in prompts]),
            processing_class=make_tokenizer(shape.vocab_size),
            callbacks=[steps],
        )
        trainer.steps = steps
        cases.progress("the weights are there")
        trainer.train()
    metrics = steps.describe(workload.num_texts)
    dtypes = {str(x.dtype) for x in trainer.model.parameters()}
    dtypes |= {
        str(x.dtype)
        for moments in trainer.optimizer.state.values()
        for x in moments.values()
        if x.ndim
    }
    metrics["dtypes"] = sorted(dtypes)
    metrics |= {"peak_bytes": torch.cuda.max_memory_allocated()} if IS_CUDA else {}
    device = torch.cuda.get_device_name() if IS_CUDA else DEVICE
    packages = ("torch", "transformers", "trl")
    call_timing.print_result(metrics, device=device, packages=packages)


if __name__ == "__main__":
    main()
