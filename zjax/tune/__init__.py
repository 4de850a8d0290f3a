"""`zjax tune`: the fastest settings by prediction, then by a few short trials."""
