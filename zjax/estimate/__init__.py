"""Estimates bytes before a run, and chooses the mesh on which a step fits."""
