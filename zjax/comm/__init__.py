"""Collectives that we own, to be called inside `jax.shard_map` alone."""
