"""How parameters change: the update rule, its schedule, precision and loss scale."""
