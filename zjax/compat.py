"""Differences between JAX versions, found by probing; the only file that knows them."""
