"""The checksums of an export, in a file of the export: whoever loads it learns what has changed.

A folder that a model is saved into again has none, since it is not the export that was written.
"""

import hashlib
import json
from pathlib import Path

FILE = "checksums.json"
WITHOUT = (FILE, "README.md", "energies.png")
"""No model's output depends on these."""
WAY_OUT = "restore it or, if it was changed on purpose, accept it: nrgpt verify {} --accept-changes"


def write_checksums(folder: Path) -> None:
    from ..files import write_atomically  # not above: exports hold a copy of this module

    found = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
    kept = {name: found[name] for name in found if name not in WITHOUT}
    write_atomically(folder / FILE, json.dumps(kept, indent=1))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def faults_of(folder: Path) -> dict[str, str]:
    """What is wrong, by the names of all files; empty texts where nothing is. Exports of earlier
    versions, and models that were saved by other means, have no checksums."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(kept, dict)
    except (ValueError, RecursionError, AssertionError) as error:
        return {FILE: f"{path} cannot be read ({error!r}); {WAY_OUT.format(folder)}"}
    found = {}
    for name, expected in kept.items():
        file = folder / Path(name).name
        if not file.is_file():
            found[name] = f"{file} is missing; {WAY_OUT.format(folder)}"
            continue
        is_same = sha256(file) == expected
        found[name] = "" if is_same else f"{file} has changed; {WAY_OUT.format(folder)}"
    return found


def check_checksums(folder: Path) -> None:
    """Raise an error if a file of an export is not as it was written. Its code counts only for
    those who run it: where nrgpt is installed, it stays closed."""
    is_ours = __name__.startswith("nrgpt.")
    found = faults_of(folder).items()
    faults = [fault for name, fault in found if fault and not (is_ours and name.endswith(".py"))]
    if faults:
        raise ValueError("; ".join(faults[:3]))


def forget_checksums(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)
