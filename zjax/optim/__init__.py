"""The optimizer: update rules, parameter groups, precision and loss scale."""
