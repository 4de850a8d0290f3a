"""The `zjax` command: trains, plans, measures, tunes and converts."""
