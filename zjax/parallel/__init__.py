"""How a model is spread over devices and over the passes of training."""
