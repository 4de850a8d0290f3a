"""Explicit collectives, to be called inside `jax.shard_map` alone."""
