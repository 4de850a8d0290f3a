"""Memory of a run, predicted: whether it fits, what to offload, and on which mesh."""
