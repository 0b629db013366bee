"""The choice of layouts: an exact minimum over legal signatures.

`options` lists what each value and operation may be, `problem` says what it costs in seconds, writes both as a mixed
integer program and solves it, `collapse` solves equal layers once. `fxpar.passes.annotate` writes the choice into the
program.
"""
