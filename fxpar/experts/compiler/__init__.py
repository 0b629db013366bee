"""What the passes use to recognise experts and to write their rows."""

import fxpar.experts.operators  # noqa: F401 - modules of this package name operators that it registers
