"""Splitting a model over devices: pipelines, tensor and sequence parallelism."""
