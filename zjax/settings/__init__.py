"""Schema of all settings, typed, with ranges and rules that need no JAX devices."""
