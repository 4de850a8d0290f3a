"""Executors: compiled programs, and the order in which a step runs them."""
