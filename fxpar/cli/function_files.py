"""The files of the autograd functions that a dump's texts name, so that the texts are read wherever one stands.

Enters: a program, or the folder of a text. Leaves: `functions.json` in a dump folder, `{module: file}`; or the modules
imported that it names and Python does not find by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

from fxpar.cli.models import user_code
from fxpar.cli.output import write_text
from fxpar.errors import InputError
from fxpar.ops.functions import function
from fxpar.program.program import Program

FUNCTIONS = "functions.json"


def save_functions(folder: Path, program: Program) -> None:
    """Notes where the modules of a program's functions are; nothing of a program without any."""
    calls = [node for node in program.graph.nodes if node.target is function]
    names = {str(node.kwargs["path"]).rpartition(".")[0] for node in calls}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)}
    paths = {name: file for name, file in files.items() if file}
    (folder / FUNCTIONS).unlink(missing_ok=True)  # of an earlier dump
    if paths:
        write_text(folder / FUNCTIONS, json.dumps(paths, indent=1) + "\n")


def import_functions(folder: Path) -> None:
    """Imports what a dump's texts need and Python does not find.

    Raises:
        InputError: the note is damaged, or a file is gone or faulty.
    """
    path = folder / FUNCTIONS
    if not path.is_file():
        return
    try:
        files = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"cannot be read: {error}", where=str(path), remedy="dump the model again") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise InputError("is no {module: file}", where=str(path), remedy="dump the model again")
    for name, file in files.items():
        if name not in sys.modules and not _is_found(name):
            if not Path(file).is_file():
                raise InputError(f"{file} of the module {name} is gone", where=str(path), remedy="put it back")
            with user_code(file):
                _import(name, Path(file))


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import(name: str, file: Path) -> None:
    """From the folder above its package; a file that was run under another name than its own by itself."""
    *packages, last = name.split(".")
    root = str(file.parents[len(packages)]) if len(packages) < len(file.parents) else ""
    sys.path.insert(0, root)
    try:
        if last == file.stem:
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(root)
