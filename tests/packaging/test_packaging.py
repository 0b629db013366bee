"""The wheel and the sdist hold the whole package: `fxpar.passes`, a link in the checkout, is real files in both."""

import stat
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Run with the folder of the unpacked wheel and the checkout; an editable install has put the checkout on sys.path.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
from pathlib import Path

wheel, checkout = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:] = [str(wheel)] + [entry for entry in sys.path if Path(entry).resolve() != checkout]
import fxpar

names = [module.name for module in pkgutil.walk_packages(fxpar.__path__, "fxpar.") if module.name != "fxpar.__main__"]
if importlib.util.find_spec("triton") is None:
    for name in ("ops.dropout_kernels", "ops.dropped_kernels", "experts.operators.row_kernels"):
        names.remove(f"fxpar.{name}")
    names.remove("fxpar.peer_memory.runtime.push_kernels")
    names.remove("fxpar.peer_memory.runtime.push_needed")
for name in names:
    file = importlib.import_module(name).__file__
    assert file is not None and Path(file).is_relative_to(wheel), (name, file)
print(*names)
"""


def pass_files() -> dict[str, bytes]:
    """Text of every file of the passes, by its path in the package."""
    files = {f"fxpar/passes/{path.name}": path.read_bytes() for path in (ROOT / "passes").glob("*.py")}
    assert "fxpar/passes/__init__.py" in files
    return files


def test_passes_are_a_relative_link_in_the_checkout() -> None:
    link = ROOT / "fxpar" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_wheel_holds_the_passes_as_files(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    metadata = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        assert "fxpar/py.typed" in entries
        assert {name.split("/")[0] for name in entries} == {"fxpar", metadata}
        for name, content in pass_files().items():
            assert not stat.S_ISLNK(entries[name].external_attr >> 16), name
            assert archive.read(name) == content, name


def test_sdist_holds_the_passes_as_files(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        for name, content in pass_files().items():
            member = archive.getmember(f"{top}/{name}")
            assert member.isfile(), name
            packed = archive.extractfile(member)
            assert packed is not None
            assert packed.read() == content, name


def run_unpacked(program: str, dist: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program with the wheel's folder and the checkout as arguments; it must end well."""
    (wheel,) = dist.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    command = [sys.executable, "-I", "-c", program, str(unpacked), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_wheel_imports_without_the_checkout(dist: Path, tmp_path: Path) -> None:
    done = run_unpacked(IMPORT_ALL, dist, tmp_path)
    assert "fxpar.passes" in done.stdout.split()


# What a user without transformers sees: an install without extras has none.
WITHOUT_EXTRAS = """
import sys
from pathlib import Path

wheel, checkout = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:] = [str(wheel)] + [entry for entry in sys.path if Path(entry).resolve() != checkout]
sys.modules["transformers"] = None
from fxpar.cli.main import main

assert main(["groups", "--tp", "2"]) == 0
assert "torch" not in sys.modules
assert main(["verify", "hf:gpt2", "--tp", "2"]) == 2
import fxpar

try:
    fxpar.Trainer
except fxpar.FxparError as error:
    assert "fxpar.Trainer: needs transformers and accelerate" in str(error)
    assert error.remedy == "pip install 'fxpar[hf]'"
else:
    raise AssertionError("it is there")
"""


def test_without_extras_models_of_transformers_are_refused_with_the_remedy(dist: Path, tmp_path: Path) -> None:
    done = run_unpacked(WITHOUT_EXTRAS, dist, tmp_path)
    assert done.stderr == "error: hf:gpt2: transformers is not installed; pip install 'fxpar[hf]'\n"


def test_the_range_of_torch_ends_at_what_was_tried(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    (torch,) = (text for text in wanted if text.startswith("torch"))
    assert set(torch.removeprefix("torch").split(",")) == {">=2.11", "<2.16"}
