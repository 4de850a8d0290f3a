"""Commands of `zjax`: train, plan, tune, generate, serve, evaluate, export and more."""
