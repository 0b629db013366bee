"""Schedules: what each rank of a pipeline runs, in which order, and the proof that all ranks together finish."""
