"""Optimizers by flat names of settings, for tests over several rules or schedules."""

from zjax.settings import choices, schema

RULES = choices.kinds(schema.Rule)
SCHEDULES = choices.kinds(schema.Schedule)


def optimizer(rule="adamw", schedule="cosine", **settings):
    """Optimizer whose rule and schedule take the settings that they read."""
    sections = {"rule": RULES[rule], "schedule": SCHEDULES[schedule]}
    for name, section in sections.items():
        read = settings.keys() & choices.names(section)
        sections[name] = section(**{x: settings.pop(x) for x in read})
    return schema.Optimizer(**sections, **settings)
