"""Description of a run at the start: plan, dtypes, batch sizes and first step."""

from collections.abc import Sequence

from zjax.estimate.tables import kept_rows
from zjax.optim.precision import describe_precision
from zjax.run.build import Run
from zjax.settings.batch import resolve_batch
from zjax.sharding.describe import describe_plan_totals
from zjax.train.average import parts_of
from zjax.train.state import TrainState


def describe_start(
    run: Run, state: TrainState, notes: Sequence[str], evaluation: str
) -> str:
    """Describes a run in lines of at most 100 columns.

    `notes` describe the data, and `evaluation` the evaluation data; each may be empty.
    """
    config, plan, step = run.config, run.plan, int(state.step)
    sizes = resolve_batch(config, plan.num_batch_shares)
    start = f"continues at step {step}" if step else "starts from step 0"
    part = f"evaluation: {evaluation}, weights {parts_of(state)[0]}"
    return "\n".join(
        [
            describe_plan_totals(plan, kept_rows(plan, config)),
            describe_precision(config.precision, config.optimizer.rule),
            f"batch: {sizes.global_batch_size} = {sizes.microbatch_size} per share "
            f"x {plan.num_batch_shares} shares x "
            f"{sizes.num_microbatches} microbatches; {start}, "
            f"ends at {config.num_steps}",
            *(note for note in notes if note),
            part if evaluation else "evaluation: none",
        ]
    )
