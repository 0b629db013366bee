"""Implementations of fxpar's graph operators on a rank's tensors, bound to process groups."""
