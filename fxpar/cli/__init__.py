"""The command line: one file a family of commands.

Enters: words of a command line. Leaves: a report on stdout, progress and errors on stderr, an exit status. Modules that
declare commands import torch and the compiler only inside the commands' bodies, so that help answers at once.
"""
