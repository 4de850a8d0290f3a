"""One process of one run; `train.py` starts it in a node of the network."""

import argparse
import json
import pathlib

import jax
import methods
import records

import zjax
from zjax import processes
from zjax.data import find_evaluation
from zjax.run.compiler import use_program_cache

COMPILATION = "/jax/core/compile/backend_compile_duration"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True)
    parser.add_argument("--setup", type=json.loads, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--process_id", type=int, required=True)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    settings = methods.settings_of(given.method, given.setup["num_processes"])
    config = zjax.load_config(*settings, *given.settings)
    use_program_cache()
    info = processes.start(config)
    header = {"method": given.method, "setup": given.setup}
    path = given.output if given.process_id == 0 else None
    with processes.explain_timeouts():
        train(config, records.Recorder(path, header))
    processes.finish(info)


def train(config: zjax.Config, recorder: records.Recorder) -> None:
    """Takes all steps, and evaluates every few."""
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    held_out = find_evaluation(config, run.batch_placement)
    state, every = run.state, config.evaluation.every_steps
    compiled = note_compiled()
    with zjax.make_loader(
        config, run.batch_placement, num_batches=config.num_steps
    ) as loader:
        for number, batch in enumerate(loader, start=1):
            is_due = number % every == 0 or number == config.num_steps
            compiled.clear()
            with recorder.step(number) as record:
                state, metrics = run.step(state, batch)
                record["loss"] = float(metrics["loss"])
                record["compiles"] = bool(compiled)
                if is_due:  # what is still on its way counts
                    jax.block_until_ready(state)
            if is_due and held_out:
                found = held_out.mean(lambda batch, at=state: run.evaluate(at, batch))
                recorder.evaluation(number, found["eval_loss"])


def note_compiled() -> list[str]:
    """A list to which each compilation from now on adds an entry."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILATION:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return found


if __name__ == "__main__":
    main()
