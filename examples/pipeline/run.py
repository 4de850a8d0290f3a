"""A model from text to a server: pre-training, supervised start, GRPO, and fewer bits.

python examples/pipeline/run.py [--task=reverse] [--directory=runs/pipeline]

The text is the source of Python's standard library. Stages that are finished are read,
not run again; the report card is `<directory>/<task>/report.md`, with a picture.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import urllib.request

import matplotlib.pyplot as plt

import zjax
from zjax.rl import tasks
from zjax.run.compiler import use_program_cache

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent / "rl"))

import data  # noqa: E402  (of examples/rl)
import report  # noqa: E402
import train  # noqa: E402

CODES = "q8_0"
"""Type of the quantised file, one of `zjax export --format=gguf --quantize`."""
PANELS = {"pretraining": "loss", "supervised": "loss", "grpo": "reward"}
"""What the picture shows of each stage."""


def pretrain(folder, settings):
    """Reads the standard library; returns the trainer."""
    print("\npretraining", flush=True)
    changes = {"directory": str(folder / "pretraining")}
    chosen = [x.removeprefix("pretraining:") for x in settings]
    chosen = [x for x in chosen if x.partition(":")[0] not in train.NAMES]
    config = zjax.load_config(HERE / "pretraining.py", changes, *chosen)
    trainer = zjax.Trainer(config)
    trainer.fit()
    trainer.close()
    return trainer


def learn(name, folder, sizes, settings):
    """Runs the stages that train; returns the report card, with one row each."""
    task, files = getattr(tasks, name), folder / "data"
    data.find_data(task, files, sizes)
    held_out = data.read_lines(files / "held_out.jsonl")
    trainer = pretrain(folder, settings)
    report.Card(folder / "card.json", task, held_out).examine("pretraining", trainer)
    start = f"supervised:checkpoint.init_from={folder / 'pretraining'}"
    others = [x for x in settings if not x.startswith("pretraining:")]
    return train.learn(name, "grpo", folder, sizes=sizes, settings=[start, *others])


def quantise(folder, card, settings):
    """Writes the trained weights in 8 bits, and examines the file; returns its path."""
    path = folder / f"grpo-{CODES}.gguf"
    words = ("export", f"--run={folder / 'grpo'}", f"--output={path}", "--format=gguf")
    command = [sys.executable, "-m", "zjax.cli.main", *words, f"--quantize={CODES}"]
    subprocess.run(command, check=True)
    own = train.of_stage("supervised", settings)
    start = f"checkpoint.init_from={path}"
    config = train.load("supervised", folder.name, folder, *own, start)
    card.examine(path.name, zjax.Trainer(config, step=0))
    return path


def ask_server(run, prompt):
    """Serves a run by a process of its own; returns the most likely text."""
    words = ("-m", "zjax.cli.main", "serve", f"--run={run}", "--port=0")
    server = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        first = next((x for x in server.stdout if x.startswith("serving ")), "")
        if not first:
            sys.exit(f"zjax serve ended with status {server.wait()}")
        address = first.split(" at ")[1].split()[0]
        body = {"prompt": prompt, "max_tokens": report.MAX_NEW_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait()


def check_server(folder, settings, prompt):
    """Asks a server, whose text must be the text of the trained weights."""
    served = ask_server(folder / "grpo", prompt)
    trainer = train.run("grpo", folder.name, folder, settings)
    sampling = zjax.Sampling(max_new_tokens=report.MAX_NEW_TOKENS)
    with zjax.Generator(trainer.run, trainer.state) as generator:
        [text] = generator.generate([prompt], sampling)
    if served != text.text:
        sys.exit(f"the server wrote {served!r}, and the run {text.text!r}")
    return served


def draw_curves(folder, path):
    """Draws the loss or the reward of each stage."""
    figure, panels = plt.subplots(
        1, len(PANELS), figsize=(12, 3.5), layout="constrained"
    )
    for panel, (stage, value) in zip(panels, PANELS.items(), strict=True):
        lines = data.read_lines(folder / stage / "metrics.jsonl")
        points = [(line["step"], line[value]) for line in lines if value in line]
        panel.plot(*zip(*points, strict=True), marker=".")
        panel.set(title=stage, xlabel="step", ylabel=value)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def write_report(path, card, quantised, prompt, served):
    """Writes the rates of each stage, samples, and what the server wrote."""
    lines = ["# Report card", "", f"![Curves of each stage]({path.stem}.png)", ""]
    lines += ["| stage | pass@1 | pass@8 |", "|---|---|---|"]
    for stage, found in card.stages.items():
        rates = found["pass_at_1"], found["pass_at_8"]
        lines.append(f"| {stage} | {rates[0]:.1%} | {rates[1]:.1%} |")
    size = quantised.stat().st_size / 1e3
    lines += ["", f"`{quantised.name}` takes {size:.0f} kB, and was read back.", ""]
    lines += ["Texts of held-out prompts:", ""]
    for stage, found in card.stages.items():
        for asked, text, reward in found["samples"]:
            judged = "right" if reward else "wrong"
            lines.append(f"- {stage}, {judged}: `{asked + text!r}`")
    lines += ["", f"`zjax serve` was asked `{prompt!r}`, and wrote `{served!r}`.", ""]
    path.write_text("\n".join(lines), "utf-8", "backslashreplace")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--task", choices=tasks.__all__, default="reverse")
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path("runs/pipeline")
    )
    data.add_sizes(parser)
    parser.add_argument("settings", nargs="*", help="as of examples/rl/train.py")
    given = parser.parse_args(words)
    use_program_cache()
    folder = given.directory / given.task
    card = learn(given.task, folder, data.sizes_of(given), given.settings)
    [row] = getattr(tasks, given.task).rows(1, seed=2, held_out=True)
    others = [x for x in given.settings if not x.startswith("pretraining:")]
    quantised = quantise(folder, card, others)
    served = check_server(folder, others, row["prompt"])
    draw_curves(folder, folder / "report.png")
    write_report(folder / "report.md", card, quantised, row["prompt"], served)
    card.show()
    print(f"report: {folder / 'report.md'}")


if __name__ == "__main__":
    main()
