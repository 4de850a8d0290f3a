"""Quantises trained weights: rounding, GPTQ, AWQ and SmoothQuant, layer by layer."""
