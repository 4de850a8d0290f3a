"""`zjax tune` on GPT-2 1.5B, and the speed of the settings that it writes.

It is told the batch, and nothing of how to split or recompute it. The settings are
timed as `zjax bench` does it, in another process than the trials.

python examples/benchmarks/tune_speed.py [--trials=4] [SETTING=VALUE ...]
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import tempfile

CONFIG = "configs/gpt2_1p5b.py"


def tune(folder, trials, settings):
    """The number of trials, and the file of the tuned settings."""
    command = [sys.executable, "-m", "zjax.cli.main", "tune", f"--config={CONFIG}"]
    changes = [*settings, f"directory={folder}"]
    command += [f"--trials={trials}", *(f"--config.{each}" for each in changes)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return len((folder / "tune.jsonl").read_text().splitlines()), folder / "tuned.gin"


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        number, path = tune(pathlib.Path(name), given.trials, given.settings)
        from zjax.config import load_config
        from zjax.processes.programs import result_line
        from zjax.run.bench import measure

        found = measure(load_config(path))
    print(result_line(dataclasses.asdict(found) | {"trials": number}))


if __name__ == "__main__":
    main()
