"""A model as segments of blocks, and what may be done to every block."""
