"""Command that shows what a run, or generation, would take: `zjax plan`."""

from absl import flags

from zjax.cli import commands
from zjax.cli.usage import Command, flag, integer, number, switch
from zjax.compress.plan import report_recipes
from zjax.config.flags import refuse_flags, settings_given
from zjax.estimate.tables import describe_zero_table
from zjax.generation.dtypes import Dtypes
from zjax.run.generation_plan import report_generation
from zjax.run.plan_report import PAPER_DEVICES, report_plan

GENERATION = "model", "device", "max_rows", "max_length", *commands.DTYPES_STORED
"""Flags that are read with `--generate`."""
COMPRESSION = "compress", "model", "device", "run"
"""Flags that are read with `--compress`."""


def plan(given: flags.FlagValues) -> None:
    """Prints memory, communication and schedule of a run, or what generation takes."""
    if given.generate:
        plan_generation(given)
        return
    if given.compress:
        plan_compression(given)
        return
    refuse_flags(given, GENERATION, "has no effect without --generate")
    if given.num_params:
        others = [name for name in PLAN.flags if name != "num_params"]
        others += settings_given(given)
        refuse_flags(given, others, "has no effect with --num_params")
        print(describe_zero_table(given.num_params, PAPER_DEVICES))
        return
    print(
        report_plan(
            commands.settings(given),
            num_devices=given.num_devices,
            picture=given.output,
            collectives=given.collectives,
            link=given.link,
            schedule=given.schedule,
            device_gb=given.device_gb,
            devices_per_host=given.devices_per_host,
        )
    )


def plan_generation(given: flags.FlagValues) -> None:
    """Prints what generation with the weights of a run or of a checkpoint takes."""
    read = *GENERATION, "generate", "run", "num_devices", "device_gb"
    others = [name for name in PLAN.flags if name not in read]
    refuse_flags(given, others, "has no effect with --generate")
    print(
        report_generation(
            commands.generating_settings(given),
            num_devices=given.num_devices,
            device=given.device,
            device_gb=given.device_gb,
            max_rows=given.max_rows,
            max_length=given.max_length,
            dtypes=Dtypes(given.weight_dtype, given.cache_dtype),
        )
    )


def plan_compression(given: flags.FlagValues) -> None:
    """Prints sizes and decode times of a model by each recipe of `zjax compress`."""
    others = [name for name in PLAN.flags if name not in COMPRESSION]
    refuse_flags(given, others, "has no effect with --compress")
    print(report_recipes(commands.generating_settings(given), given.device))


PLAN = Command(
    plan,
    "Shows what a run would take: memory, communication, schedule.",
    "zjax plan --config=quickstart --num_devices=1024\n"
    "zjax plan --config=quickstart --config.mesh=auto\n"
    "zjax plan --generate --config=llama_8b --num_devices=1 --device=H200\n"
    "zjax plan --compress --config=llama_8b --device=H200\n"
    "zjax plan --num_params=7.5e9",
    (
        commands.RUN,
        integer("num_devices", "Devices to plan for; none is used.", 0, lower_bound=0),
        number(
            "num_params",
            "ZeRO's memory table for a model of so many parameters; no settings.",
            0.0,
            lower_bound=0,
        ),
        switch("collectives", "What the compiled step sends between devices."),
        flag(
            "link",
            "Speed of the link of a node, such as 1gbps, 100mbps (bits) or 25GBps "
            "(bytes); predicts a step by each method that sends less.",
        ),
        switch(
            "schedule",
            "What changes from step to step, and when the stages of a pipeline are "
            "busy, with pictures.",
        ),
        switch("generate", "What generation takes, in place of training."),
        switch("compress", "Sizes and decode times by recipe of zjax compress."),
        commands.MODEL,
        flag("device", "Kind of the devices, for --generate and --compress."),
        commands.MAX_ROWS,
        commands.MAX_LENGTH,
        commands.WEIGHT_DTYPE,
        commands.CACHE_DTYPE,
        number(
            "device_gb",
            "Memory of a device, for mesh=auto and --generate.",
            0.0,
            lower_bound=0,
        ),
        integer(
            "devices_per_host",
            "Devices that fast links join, for mesh=auto.",
            0,
            lower_bound=0,
        ),
        flag("output", "Picture of the plan to write (.png)."),
    ),
)
