"""Commands of `zjax`: train, plan, bench, tune, generate, evaluate, export, convert."""
