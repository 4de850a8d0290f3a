"""The optimizer: update rules, parameter groups, phases, precision and loss scale."""
