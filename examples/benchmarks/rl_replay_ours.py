"""How far sampler and trainer are apart for a mixture of experts of random weights.

python examples/benchmarks/rl_replay_ours.py [--shape=moe] --ways=replay
python examples/benchmarks/rl_replay_ours.py [--shape=moe] --ways=routers

The weights do not change. The trainer computes a token by the experts that the sampler
chose (`replay`), or by those that its own routers choose (`routers`).
"""

import tempfile

import call_timing
import jax
import numpy as np
import rl_cases as cases
from rl_ours import Steps, compare, make_trainer

WAYS = "replay", "routers"
NO_RECORD = -1
"""Expert of a token whose router chooses."""


def measure(trainer, way, num_steps):
    """Metrics of the texts of the last of some rollouts."""
    steps = Steps(trainer)
    batch = [steps.draw() for _ in range(num_steps)][-1]
    experts = np.asarray(batch["experts"])
    metrics = {"recorded_share": float((experts != NO_RECORD).mean())}
    if way == "routers":
        batch = batch | {"experts": np.full_like(experts, NO_RECORD)}
    return metrics | compare(trainer, batch)


def main() -> None:
    parser = cases.make_parser("moe")
    parser.add_argument("--ways", choices=WAYS, default="replay")
    given = parser.parse_args()
    given.exact = given.reference = given.supervised = False
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(given, directory)
        cases.progress("the weights are there")
        metrics = measure(trainer, given.ways, given.num_steps)
        trainer.close()
    device = jax.devices()[0].device_kind
    call_timing.print_result(metrics, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
