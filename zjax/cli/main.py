"""The `zjax` command."""

import functools
import shlex
import signal
import sys
from collections.abc import Sequence

import jax
import numpy as np
from absl import app, flags, logging

from zjax import data, processes
from zjax.cli import (
    commands,
    data_commands,
    generating,
    measuring,
    planning,
    reinforcing,
)
from zjax.cli.compressing import COMPRESS
from zjax.cli.connection import connected
from zjax.cli.data_commands import MAX_PROCESSES
from zjax.cli.serving import SERVE
from zjax.cli.tune import MAX_TRIALS, tune
from zjax.cli.usage import (
    HELP_WORDS,
    SHELLS,
    Command,
    check_command,
    completion_script,
    describe_command,
    describe_commands,
    flag,
    integer,
    number,
)
from zjax.config import flags as config_flags
from zjax.config.flags import refuse_flags
from zjax.data.prompts import (
    as_talk,
    find_question,
    has_answers,
    has_conversations,
)
from zjax.errors import ConfigError, Problem, ZjaxError
from zjax.processes.agreement import versions
from zjax.run.compiler import simulation, use_program_cache
from zjax.run.ending import exit_on_signals
from zjax.run.machine import describe_machine
from zjax.run.trainer import Trainer
from zjax.settings.describe import describe_settings

SAMPLE_TOKENS = 100
"""Number of tokens of the sample that is shown at the end of training."""


def train(given: flags.FlagValues) -> None:
    """Trains as configured, alone or with further processes of the run.

    With `--run` a run continues, with the saved settings and the given changes. A run
    stopped early exits with status 143 (SIGTERM), 130 (Ctrl-C) or 129 (SIGHUP), so that
    no scheduler takes the run for finished.
    """
    config = commands.settings(given)
    with connected(config) as info, processes.hold(config.directory):
        several = info.num_processes > 1
        cache = use_program_cache(config.directory if several else "")
        trainer = commands.trainer_of(config.preference)(config)
        if info.process_id == 0:
            print(f"compiled programs: {cache or 'not cached'}")
            if given.ds_config:
                print(data_commands.summarise_file(given.ds_config))
            print(trainer.describe())
            print(f"every array of the plan: {plan_command(sys.argv[2:])}")
        # A prompt that is refused must be refused before training.
        prompt = sample_prompt(trainer, given["prompt"])
        trainer.fit()
        text = sample(trainer, prompt)
        if text and info.process_id == 0:
            print(f"sample:\n{text}")
        trainer.close()
    # After the processes have disconnected, which an exit inside would skip.
    if trainer.exit_status:
        sys.exit(trainer.exit_status)


TRAIN = Command(
    train,
    "Trains a model as configured, and goes on from its last checkpoint.",
    "zjax train --config=quickstart --config.zero.stage=3\n"
    "zjax train --run=runs/quickstart --config.num_steps=1000",
    (
        commands.RUN,
        flag(
            "prompt",
            "Text that the trained language model continues at the end.",
            "def ",
        ),
    ),
)


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


def sample_prompt(trainer: Trainer, flag: flags.Flag) -> np.ndarray | None:
    """Encodes the prompt that the trained model continues at the end.

    Conversations of the data give a question, and `--prompt` becomes a message. None if
    tokens are not text, if the model gives rewards, or if the default prompt does not
    fit.
    """
    config = trainer.config
    is_text = config.model.kind == "decoder" and config.data.source != "synthetic"
    # A model that learns rewards alone no longer writes text.
    is_text &= config.preference is None or not config.preference.has_rewards
    if not is_text:
        return None
    text = str(flag.value)
    if flag.present:
        message = {"role": "user", "content": text}
        given = as_talk([message]) if has_conversations(config.data) else text
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


def tune_run(given: flags.FlagValues) -> None:
    """Finds fast settings of a run."""
    print(
        tune(
            config_flags.config_from_flags(given),
            num_trials=given.trials,
            output=given.output,
            simulated_devices=given.simulated_devices,
            device_gb=given.device_gb,
        )
    )


TUNE = Command(
    tune_run,
    "Finds the fastest settings: by prediction, then by a few short trials.",
    "zjax tune --config=quickstart --trials=4",
    (
        integer(
            "trials",
            "Most trials of a few steps, those of earlier calls included.",
            4,
            lower_bound=1,
            upper_bound=MAX_TRIALS,
        ),
        number(
            "device_gb",
            "Memory of a device, where it is not known.",
            0.0,
            lower_bound=0,
        ),
        flag("output", "Gin file to write; tuned.gin in the run's folder by default."),
    ),
)


def evaluate(given: flags.FlagValues) -> None:
    """Prints loss and metrics of a checkpoint on the evaluation data."""
    config = commands.settings_to_evaluate(given)
    with connected(config):
        commands.evaluate(config, given)


EVALUATE = Command(
    evaluate,
    "Prints loss and metrics of a checkpoint on held-out data.",
    "zjax evaluate --run=runs/quickstart --step=best\n"
    "zjax evaluate --run=runs/quickstart --config.data.path=other_tokens\n"
    "zjax evaluate --run=checkpoints/Qwen3-8B --config.data.source=tokens \\\n"
    "    --config.data.path=tokens",
    commands.EVALUATE_FLAGS,
)


def launch(given: flags.FlagValues) -> None:
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


LAUNCH = Command(
    launch,
    "Runs another command as several processes of this machine.",
    "zjax launch --num_processes=2 train --config=quickstart",
    arguments="[--num_processes=2] COMMAND ...",
)


def complete(given: flags.FlagValues) -> None:
    """Prints the completion script of a shell."""
    parser = commands.Parser("zjax completion", allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS)
    print(completion_script(parser.parse_args(sys.argv[2:]).shell, COMMANDS), end="")


COMPLETION = Command(
    complete,
    "Prints a script by which a shell completes commands, flags and settings.",
    'eval "$(zjax completion bash)"',
    arguments="|".join(SHELLS),
)


COMMANDS = {
    "train": TRAIN,
    "rl": reinforcing.RL,
    "plan": planning.PLAN,
    "bench": measuring.BENCH,
    "tune": TUNE,
    "generate": generating.GENERATE,
    "serve": SERVE,
    "evaluate": EVALUATE,
    "data prepare": data_commands.PREPARE,
    "data analyze": data_commands.ANALYZE,
    "data teach": data_commands.TEACH,
    "export": commands.EXPORT,
    "compress": COMPRESS,
    "convert": data_commands.CONVERT,
    "rewind": commands.REWIND,
    "check": commands.CHECK,
    "launch": LAUNCH,
    "completion": COMPLETION,
    "report": Command(
        lambda given: print(describe_machine()),
        "Describes this machine, to paste.",
        "zjax report",
        has_settings=False,
    ),
    "config": Command(
        lambda given: print(describe_settings(), end=""),
        "Lists every setting and its default.",
        "zjax config",
        has_settings=False,
    ),
}
"""Commands by name; a command refuses flags that only other commands read."""


def command_name(words: Sequence[str]) -> str:
    """Name of the command that the words begin with: one or two words."""
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
        print(describe_command(name, COMMANDS[name]), end="")
    else:
        check_command(name, words, COMMANDS)
        given = flags_given(name, sys.argv)
        # Commands with arguments parse words themselves, without absl.
        if COMMANDS[name].arguments:
            COMMANDS[name].run(given)
        else:
            parse = functools.partial(config_flags.parse, flag_values=given)
            app.run(lambda argv: _call(name, argv[1:], given), flags_parser=parse)


SIMULATED_DEVICES = integer(
    "simulated_devices", "CPU devices to simulate.", 0, lower_bound=0
)


def flags_given(name: str, argv: Sequence[str]) -> flags.FlagValues:
    """Defines all flags of a command line, before they are parsed.

    The command's own flags come first, as other commands may define a flag of the same
    name with another default. Flags of other commands follow, so that
    `check_arguments` can refuse them by name; then changes of settings in `argv`.
    """
    given = flags.FlagValues()
    COMMANDS[name].define(given)
    for other in COMMANDS.values():
        other.define(given)
    SIMULATED_DEVICES(flag_values=given)
    given.append_flag_values(flags.FLAGS)
    # absl.logging reads the flags of the process, which are parsed with the others.
    flags.FLAGS.mark_as_parsed()
    config_flags.define_flags(argv, given)
    return given


def check_arguments(name: str, words: Sequence[str], given: flags.FlagValues) -> None:
    """Refuses words and flags that the command would not read, all in one error."""
    problems = [
        Problem("command", word, f"is unknown to zjax {name}", _remedy(word))
        for word in words[len(name.split()) :]
    ]
    for each in sorted({each for other in COMMANDS.values() for each in other.flags}):
        if given[each].present and each not in COMMANDS[name].flags:
            readers = [other for other in COMMANDS if each in COMMANDS[other].flags]
            remedy = f"leave it out; {' and '.join(readers)} read it"
            problem = f"has no effect on zjax {name}"
            problems.append(Problem(f"--{each}", given[each].value, problem, remedy))
    if problems:
        raise ConfigError(*problems)


def _remedy(word: str) -> str:
    """Remedy for an unknown word, which may be a setting without `--config.`."""
    return f"did you mean --config.{word}?" if "=" in word else "leave it out"


def _call(name: str, words: Sequence[str], given: flags.FlagValues) -> None:
    """Runs a command after absl has parsed the flags."""
    if not given["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    config_flags.check_numbers(given)
    # Devices can be simulated only until JAX starts them.
    for option, value in simulation(given.simulated_devices).items():
        jax.config.update(option, value)
    check_arguments(name, words, given)
    if not COMMANDS[name].has_settings:
        names = config_flags.settings_given(given)
        refuse_flags(given, names, f"has no effect on zjax {name}")
    COMMANDS[name].run(given)


if __name__ == "__main__":
    run()
