"""How work is arranged over time and devices: recomputation."""

from zjax.parallel.remat import name_attention, name_mlp, recompute

__all__ = ["name_attention", "name_mlp", "recompute"]
