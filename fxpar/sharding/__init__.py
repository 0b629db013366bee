"""The choice of layouts: an exact minimum over legal signatures.

`options` lists what each value and operation may be, `prices` says what it costs in seconds, `problem` writes both as a
mixed integer program, `collapse` solves equal layers once, `solve` gives the minimum. `fxpar.passes.annotate` writes it
into the program.
"""
