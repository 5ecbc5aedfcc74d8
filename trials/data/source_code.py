"""The source files of packages, which differ between two releases under the same version."""

import hashlib
from pathlib import Path
from types import ModuleType


def code_digest(*packages: ModuleType) -> str:
    """Return a SHA-256, in hexadecimal digits, of all modules in the folders of the packages."""
    found = hashlib.sha256()
    for package in packages:
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()
