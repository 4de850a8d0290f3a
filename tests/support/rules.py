"""Optimizers by flat names of settings, for tests over several rules or schedules."""

from zjax.settings import choices, schema

RULES = choices.kinds(schema.Rule)
SCHEDULES = choices.kinds(schema.Schedule)


def optimizer(rule="adamw", schedule="cosine", **settings):
    """Optimizer whose rule and schedule take what they read; others' are left out."""
    return schema.Optimizer(
        rule=_make(RULES, rule, settings),
        schedule=_make(SCHEDULES, schedule, settings),
        **settings,
    )


def _make(kinds, kind, settings):
    known = {name for section in kinds.values() for name in choices.names(section)}
    given = {name: settings.pop(name) for name in known & settings.keys()}
    read = given.keys() & choices.names(kinds[kind])
    return kinds[kind](**{name: given[name] for name in read})
