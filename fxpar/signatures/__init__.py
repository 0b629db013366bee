"""The legal layouts of each operation of torch, as data, and the engine that reads them.

What needs them all by operator is in `fxpar.rules`; those of fxpar's own operators stand in their records
(`fxpar.ops`).
"""
