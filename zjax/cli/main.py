"""The `zjax` command."""

import contextlib
import dataclasses
import functools
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags, logging

from zjax import data, processes
from zjax.cli import commands, data_commands
from zjax.cli.bench import describe_measurement, measure
from zjax.cli.disks import describe_disks, measure_disks
from zjax.cli.tune import MAX_TRIALS, tune
from zjax.cli.usage import (
    HELP_WORDS,
    SHELLS,
    Command,
    check_command,
    completion_script,
    describe_command,
    describe_commands,
)
from zjax.config import flags as config_flags
from zjax.config.check import check_processes
from zjax.data.metrics import METRICS
from zjax.data.prompts import as_talk, find_question, has_answers
from zjax.errors import ConfigError, Problem, ZjaxError
from zjax.estimate.tables import describe_zero_table
from zjax.files import local_path
from zjax.observe.report import describe_machine
from zjax.processes.agreement import versions
from zjax.processes.programs import result_line
from zjax.run.compiler import simulation, use_program_cache
from zjax.run.ending import exit_on_signals
from zjax.run.pinned_pool import limit_pinned_pool
from zjax.run.plan_report import PAPER_DEVICES, report_plan
from zjax.run.trainer import Trainer
from zjax.settings.describe import describe_settings
from zjax.settings.schema import Config
from zjax.train.average import PARTS

DTYPES = ("float32", "bfloat16", "float16")
MAX_PROCESSES = 1_024
SAMPLE_TOKENS = 100
"""Number of tokens of the sample that is shown at the end of training."""


def define_flags(argv: Sequence[str] | None = None) -> None:
    """Defines the flags of all commands; settings of a run are `--config...`."""
    config_flags.define_flags(argv)
    flags.DEFINE_integer(
        "simulated_devices", 0, "CPU devices to simulate.", lower_bound=0
    )
    flags.DEFINE_integer(
        "num_devices",
        0,
        "Devices to plan for; none is used.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "num_params",
        0.0,
        "ZeRO's memory table for a model of so many parameters; no settings.",
        lower_bound=0,
    )
    flags.DEFINE_boolean(
        "collectives", False, "What the compiled step sends between devices."
    )
    flags.DEFINE_string(
        "link",
        "",
        "Speed of the link of a node, such as 1gbps, 100mbps (bits) or 25GBps "
        "(bytes); predicts a step by each method that sends less.",
    )
    flags.DEFINE_boolean(
        "schedule",
        False,
        "What changes from step to step, and when the stages of a pipeline are "
        "busy, with pictures.",
    )
    flags.DEFINE_float(
        "device_gb", 0.0, "Memory of a device, for mesh=auto.", lower_bound=0
    )
    flags.DEFINE_integer(
        "devices_per_host",
        0,
        "Devices that fast links join, for mesh=auto.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "trials",
        4,
        "Most trials of a few steps, those of earlier calls included.",
        lower_bound=1,
        upper_bound=MAX_TRIALS,
    )
    flags.DEFINE_list("nvme", [], "Directories on disks; measures these for offload.")
    flags.DEFINE_multi_string(
        "input", [], "Text, JSON, Parquet, Arrow, or a folder; may be repeated."
    )
    flags.DEFINE_string("output", "", "What to write.")
    flags.DEFINE_list(
        "metrics",
        ["seqreo", "voc"],
        f"Some of {', '.join(METRICS)}, module:function.",
    )
    flags.DEFINE_integer(
        "num_processes",
        0,
        "Processes; 0 takes one per core.",
        lower_bound=0,
        upper_bound=MAX_PROCESSES,
    )
    flags.DEFINE_string(
        "tokenizer", "bytes", "bytes, bpe:SIZE, ids:SIZE or a .json file."
    )
    flags.DEFINE_string("text_field", "text", "Field or column with the text.")
    flags.DEFINE(
        flags.ArgumentParser(),
        "chat",
        "",
        "Checkpoint whose template encodes conversations.",
        boolean=True,  # a value may be left out
    )
    flags.DEFINE_bool(
        "special_tokens", False, "Names of special tokens in a text are these tokens."
    )
    flags.DEFINE_bool(
        "skip_broken", False, "Leave out records that cannot be used; count them."
    )
    flags.DEFINE_float("validation_fraction", 0.01, "Part of the text held out.")
    flags.DEFINE_enum("part", "auto", PARTS, "Which weights; auto takes averaged ones.")
    flags.DEFINE_string("run", "", "Directory of a run, which has its settings.")
    flags.DEFINE_string("step", "latest", "Checkpoint: latest, best or a number.")
    flags.DEFINE_enum(
        "format",
        "safetensors",
        ["safetensors", "hf", "peft"],
        "One file with the names of zjax, or a folder for transformers; "
        "peft has adapters alone.",
    )
    flags.DEFINE_enum(
        "dtype", "", ["", *DTYPES], "Dtype of the weights; theirs by default."
    )
    flags.DEFINE_string("prompt", "def ", "Text to continue.")
    flags.DEFINE_string(
        "file", "", "Text with a prompt a line; prints a line of JSON for each."
    )
    flags.DEFINE_integer("max_new_tokens", 0, "Tokens to add; 0 fills the context.")
    flags.DEFINE_float("temperature", 0.8, "0 takes the most likely token.")
    flags.DEFINE_integer(
        "top_k", 40, "Most likely tokens to draw from; 0 is all.", lower_bound=0
    )
    flags.DEFINE_float("top_p", 1.0, "Probability of the tokens to draw from.")
    flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0)


@contextlib.contextmanager
def connected(config: Config) -> Iterator[processes.ProcessInfo]:
    """Connects the processes of a run, and disconnects the processes afterwards."""
    check_processes(config)
    if processes.needs_parent(config.processes):
        # orig_argv keeps `-m` and options of the interpreter.
        sys.exit(processes.supervise([sys.executable, *sys.orig_argv[1:]]))
    prepare = functools.partial(limit_pinned_pool, config)
    info = processes.start(config, prepare=prepare)
    if info.process_id == 0 and info.num_processes > 1:
        print(processes.describe_processes(info))
    with processes.explain_timeouts():
        yield info
    # Skipped after an error: peers that failed would never come to the barrier.
    processes.finish(info)


def train() -> None:
    """Trains as configured, alone or with further processes of the run.

    With `--run` a run continues, with the saved settings and the given changes. A run
    stopped early exits with status 143 (SIGTERM), 130 (Ctrl-C) or 129 (SIGHUP), so that
    no scheduler takes the run for finished.
    """
    config = commands.settings()
    with connected(config) as info, processes.hold(config.directory):
        several = info.num_processes > 1
        cache = use_program_cache(config.directory if several else "")
        trainer = Trainer(config)
        if info.process_id == 0:
            print(f"compiled programs: {cache or 'not cached'}")
            if flags.FLAGS.ds_config:
                print(data_commands.summarise_file(flags.FLAGS.ds_config))
            print(trainer.describe())
            print(f"every array of the plan: {plan_command(sys.argv[2:])}")
        # A prompt that is refused must be refused before training.
        prompt = sample_prompt(trainer)
        trainer.fit()
        text = sample(trainer, prompt)
        if text and info.process_id == 0:
            print(f"sample:\n{text}")
        trainer.close()
    # After the processes have disconnected, which an exit inside would skip.
    if trainer.exit_status:
        sys.exit(trainer.exit_status)


def plan_command(words: Sequence[str]) -> str:
    """Translates the arguments of a `zjax train` command into a `zjax plan` command.

    Example:
        >>> plan_command(["--config=a.py", "--config.seed=1", "--prompt", "some text"])
        'zjax plan --config=a.py --config.seed=1'
        >>> plan_command(["--run=runs/a"])
        'zjax plan --run=runs/a'
    """
    command, remaining = ["zjax", "plan"], iter(words)
    for word in remaining:
        flag, has_value, _ = word.lstrip("-").partition("=")
        if flag not in COMMANDS["train"].flags or flag in COMMANDS["plan"].flags:
            command.append(word)
        elif not has_value:
            next(remaining, None)
    return shlex.join(command)


def sample_prompt(trainer: Trainer) -> np.ndarray | None:
    """Encodes the prompt that the trained model continues at the end.

    Conversations of the data give a question, and `--prompt` becomes a message. None if
    tokens are not text, or if the default prompt does not fit.
    """
    config, flag = trainer.config, flags.FLAGS["prompt"]
    is_text = config.model.kind == "decoder" and config.data.source != "synthetic"
    if not is_text:
        return None
    text = str(flag.value)
    if flag.present:
        message = {"role": "user", "content": text}
        given = as_talk([message]) if has_answers(config.data) else text
        return trainer.encode_prompts([given])[0]
    if has_answers(config.data):
        return find_question(
            config.data, config.model.vocab_size, config.model.max_length // 2
        )
    encoded = data.make_tokenizer(config).encode(text)
    return encoded if len(encoded) < config.model.max_length else None


def sample(trainer: Trainer, prompt: np.ndarray | None) -> str:
    """Continues a prompt with the trained model; empty if the run is not finished."""
    config = trainer.config
    if prompt is None or trainer.step != config.num_steps:
        return ""
    fits = config.model.max_length > len(prompt) + SAMPLE_TOKENS
    text = trainer.generate(prompt, max_new_tokens=SAMPLE_TOKENS if fits else 0)
    return data.make_tokenizer(config).decode(prompt) + text


def plan() -> None:
    """Prints memory, communication and schedule of a run."""
    if flags.FLAGS.num_params:
        others = [name for name in COMMANDS["plan"].flags if name != "num_params"]
        given = [*others, *config_flags.settings_given()]
        config_flags.refuse_flags(given, "has no effect with --num_params")
        print(describe_zero_table(flags.FLAGS.num_params, PAPER_DEVICES))
        return
    config = commands.settings()
    print(
        report_plan(
            config,
            num_devices=flags.FLAGS.num_devices,
            picture=flags.FLAGS.output,
            collectives=flags.FLAGS.collectives,
            link=flags.FLAGS.link,
            schedule=flags.FLAGS.schedule,
            device_gb=flags.FLAGS.device_gb,
            devices_per_host=flags.FLAGS.devices_per_host,
        )
    )


def bench() -> None:
    """Measures a config or disks."""
    if flags.FLAGS.nvme:
        given = config_flags.settings_given()
        config_flags.refuse_flags(given, "has no effect with --nvme")
        disks = [local_path("nvme", path) for path in flags.FLAGS.nvme]
        speed = measure_disks(tuple(disks))
        print(describe_disks(speed))
        print(result_line(dataclasses.asdict(speed)))
        return
    config = config_flags.config_from_flags()
    with connected(config) as info:
        measurement = measure(config)
        if info.process_id == 0:
            print(describe_measurement(measurement))
            print(result_line(dataclasses.asdict(measurement)))


def tune_run() -> None:
    """Finds fast settings of a run."""
    print(
        tune(
            config_flags.config_from_flags(),
            num_trials=flags.FLAGS.trials,
            output=flags.FLAGS.output,
            simulated_devices=flags.FLAGS.simulated_devices,
            device_gb=flags.FLAGS.device_gb,
        )
    )


def evaluate() -> None:
    """Prints loss and metrics of a checkpoint on the evaluation data."""
    config = commands.settings_to_evaluate()
    with connected(config):
        commands.evaluate(config)


def launch() -> None:
    """Runs a command line as several processes of this machine."""
    number, rest = launched(sys.argv[2:])
    problems = list[Problem]()
    if number < 1:
        problems += [Problem("--num_processes", number, "is below 1", "use 1 or more")]
    if number > MAX_PROCESSES:
        problem, remedy = f"is above {MAX_PROCESSES}", "use fewer"
        problems += [Problem("--num_processes", number, problem, remedy)]
    if (name := command_name(rest)) not in COMMANDS or COMMANDS[name].arguments:
        problem, remedy = "has no command to launch", "add one, as train --config=..."
        problems += [Problem("command", "launch", problem, remedy)]
    if problems:
        raise ConfigError(*problems)
    command = [sys.executable, "-m", "zjax.cli.main", *rest]
    sys.exit(processes.supervise(command, number))


def launched(words: Sequence[str]) -> tuple[int, list[str]]:
    """Splits the arguments of `zjax launch` into a number of processes and a command.

    Example:
        >>> launched(["--num_processes=4", "train", "--config=a.py"])
        (4, ['train', '--config=a.py'])
    """
    # Flags of the inner command must not match as abbreviations.
    parser = commands.Parser("zjax launch", allow_abbrev=False, add_help=False)
    parser.add_argument("--num_processes", type=int, default=2)
    given, rest = parser.parse_known_args(words)
    return given.num_processes, rest


def complete() -> None:
    """Prints the completion script of a shell."""
    parser = commands.Parser("zjax completion", allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS)
    print(completion_script(parser.parse_args(sys.argv[2:]).shell, COMMANDS), end="")


COMMANDS = {
    "train": Command(
        train,
        "Trains a model as configured, and goes on from its last checkpoint.",
        "zjax train --config=quickstart --config.zero.stage=3\n"
        "zjax train --run=runs/quickstart --config.num_steps=1000",
        {
            "run": "",
            "prompt": "Text that the trained language model continues at the end.",
        },
    ),
    "plan": Command(
        plan,
        "Shows what a run would take: memory, communication, schedule.",
        "zjax plan --config=quickstart --num_devices=1024\n"
        "zjax plan --config=quickstart --config.mesh=auto\n"
        "zjax plan --num_params=7.5e9",
        {
            "run": "",
            "num_devices": "",
            "num_params": "",
            "collectives": "",
            "link": "",
            "schedule": "",
            "device_gb": "",
            "devices_per_host": "",
            "output": "Picture of the plan to write (.png).",
        },
    ),
    "bench": Command(
        bench,
        "Measures how fast a config is here, or disks.",
        "zjax bench --config=quickstart\nzjax bench --nvme=/mnt/a,/mnt/b",
        {"nvme": ""},
    ),
    "tune": Command(
        tune_run,
        "Finds the fastest settings: by prediction, then by a few short trials.",
        "zjax tune --config=quickstart --trials=4",
        {
            "trials": "",
            "device_gb": "Memory of a device, where it is not known.",
            "output": "Gin file to write; tuned.gin in the run's folder by default.",
        },
    ),
    "generate": Command(
        commands.generate,
        "Continues a prompt with the weights of a checkpoint.",
        'zjax generate --config=quickstart --prompt="def "\n'
        "zjax generate --run=runs/quickstart --file=prompts.txt\n"
        'zjax generate --run=runs/chat --chat --prompt="Who are you?"',
        {
            "run": "",
            "part": "",
            "step": "",
            "prompt": "",
            "file": "",
            "chat": "Takes prompts for messages, and answers them through the chat "
            "template of the data, or of this checkpoint.",
            "special_tokens": "",
            "max_new_tokens": "",
            "temperature": "",
            "top_k": "",
            "top_p": "",
            "seed": "",
        },
    ),
    "evaluate": Command(
        evaluate,
        "Prints loss and metrics of a checkpoint on held-out data.",
        "zjax evaluate --run=runs/quickstart --step=best\n"
        "zjax evaluate --run=runs/quickstart --config.data.path=other_tokens\n"
        "zjax evaluate --run=checkpoints/Qwen3-8B --config.data.source=tokens \\\n"
        "    --config.data.path=tokens",
        {
            "run": "Directory of a run, or of a Hugging Face checkpoint.",
            "part": "",
            "step": "",
        },
    ),
    "data prepare": Command(
        data_commands.prepare_data,
        "Turns text into token files.",
        "zjax data prepare --input=text.jsonl --output=tokens --tokenizer=bpe:8192",
        {
            "input": "",
            "output": "Folder to write.",
            "tokenizer": "",
            "text_field": "",
            "chat": "",
            "special_tokens": "",
            "skip_broken": "",
            "validation_fraction": "",
        },
        has_settings=False,
    ),
    "data analyze": Command(
        data_commands.analyze_data,
        "Measures how difficult samples are, for a curriculum.",
        "zjax data analyze --config=quickstart --output=index",
        {
            "metrics": "",
            "output": "Folder to write.",
            "num_processes": "",
        },
    ),
    "export": Command(
        commands.export,
        "Writes the weights of a checkpoint as safetensors.",
        "zjax export --config=quickstart --output=model.safetensors",
        {
            "run": "",
            "part": "",
            "step": "",
            "output": "File or folder to write; in the folder of the run if not given.",
            "dtype": "",
            "format": "",
        },
    ),
    "convert": Command(
        data_commands.convert_file,
        "Prints the config of a ds_config.json, and what becomes of each of its keys.",
        "zjax convert ds_config.json > config.py",
        arguments="FILE",
    ),
    "rewind": Command(
        commands.rewind,
        "Sets later checkpoints aside, so that a run goes on from a chosen one.",
        "zjax rewind --run=runs/quickstart --step=1000",
        {"run": "", "step": "Checkpoint to go on from: best or a number."},
        has_settings=False,
    ),
    "check": Command(
        commands.check,
        "Says whether the checkpoints of a run are as they were saved.",
        "zjax check runs/quickstart",
        arguments="DIRECTORY",
    ),
    "launch": Command(
        launch,
        "Runs another command as several processes of this machine.",
        "zjax launch --num_processes=2 train --config=quickstart",
        arguments="[--num_processes=2] COMMAND ...",
    ),
    "completion": Command(
        complete,
        "Prints a script by which a shell completes commands, flags and settings.",
        'eval "$(zjax completion bash)"',
        arguments="|".join(SHELLS),
    ),
    "report": Command(
        lambda: print(describe_machine()),
        "Describes this machine, to paste.",
        "zjax report",
        has_settings=False,
    ),
    "config": Command(
        lambda: print(describe_settings(), end=""),
        "Lists every setting and its default.",
        "zjax config",
        has_settings=False,
    ),
}
"""Commands by name; a command refuses flags that only other commands read."""


def command_name(words: Sequence[str]) -> str:
    """Name of the command that the words begin with: one or two words.

    Example:
        >>> command_name(["data", "prepare", "--input=a"]), command_name(["train"])
        ('data prepare', 'train')
    """
    two = " ".join(words[:2])
    return two if two in COMMANDS else "".join(words[:1])


def run() -> None:
    """Runs the command named first on the command line.

    A zjax error ends the program with status 2 and a message without a traceback.
    SIGTERM, SIGHUP and Ctrl-C end the program with 128 plus the number of the signal.
    """
    exit_on_signals()
    try:
        _run(sys.argv[1:])
    except ZjaxError as error:
        processes.record_failure(error)
        print(f"zjax: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("zjax: ended by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _run(words: Sequence[str]) -> None:
    """Dispatches words to help, version or a command."""
    is_help = words[:1] == ["help"] or any(word in HELP_WORDS[1:] for word in words)
    named = words[1:] if words[:1] == ["help"] else words
    if is_help and named[:1] == ["launch"]:
        inner = launched(named[1:])[1]
        named = inner if command_name(inner) in COMMANDS else named
    name = command_name(named)
    if words[:1] == ["--version"]:
        print(", ".join(f"{name} {versions().get(name)}" for name in ("zjax", "jax")))
    elif name in ("", *HELP_WORDS):
        print(describe_commands(COMMANDS), end="")
    elif is_help:
        check_command(name, named, COMMANDS)
        define_flags(words[:1])
        print(describe_command(name, COMMANDS[name]), end="")
    else:
        check_command(name, words, COMMANDS)
        # Commands with arguments parse words themselves, without absl.
        if COMMANDS[name].arguments:
            COMMANDS[name].run()
        else:
            define_flags()
            app.run(lambda argv: _call(name, argv[1:]), flags_parser=config_flags.parse)


def check_arguments(name: str, words: Sequence[str]) -> None:
    """Refuses words and flags that the command would not read, all in one error."""
    problems = [
        Problem("command", word, f"is unknown to zjax {name}", _remedy(word))
        for word in words[len(name.split()) :]
    ]
    for flag in sorted({flag for each in COMMANDS.values() for flag in each.flags}):
        if flags.FLAGS[flag].present and flag not in COMMANDS[name].flags:
            readers = [other for other in COMMANDS if flag in COMMANDS[other].flags]
            remedy = f"leave it out; {' and '.join(readers)} read it"
            value = flags.FLAGS[flag].value
            problem = f"has no effect on zjax {name}"
            problems.append(Problem(f"--{flag}", value, problem, remedy))
    if problems:
        raise ConfigError(*problems)


def _remedy(word: str) -> str:
    """Remedy for an unknown word, which may be a setting without `--config.`."""
    return f"did you mean --config.{word}?" if "=" in word else "leave it out"


def _call(name: str, words: Sequence[str]) -> None:
    """Runs a command after absl has parsed the flags."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    config_flags.check_numbers()
    # Devices can be simulated only until JAX starts them.
    for option, value in simulation(flags.FLAGS.simulated_devices).items():
        jax.config.update(option, value)
    check_arguments(name, words)
    if not COMMANDS[name].has_settings:
        given = config_flags.settings_given()
        config_flags.refuse_flags(given, f"has no effect on zjax {name}")
    COMMANDS[name].run()


if __name__ == "__main__":
    run()
