"""Bytes of a run before anything runs, and the mesh on which they fit."""
