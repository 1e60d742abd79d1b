"""`python -m turnwise.demo.model_directory DIRECTORY`: build the demo's model into a directory, once.

This is for a container's volume, a directory that exists and cannot be renamed: the model is built elsewhere and its
files are copied, the configuration last, because its presence marks a complete model.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from turnwise.demo.small_model import build_small_model

COMPLETE = "config.json"


def fill(directory: Path) -> bool:
    """Build the demo's model into a directory unless it holds a model; return whether it was built."""
    if (directory / COMPLETE).is_file():
        return False
    with tempfile.TemporaryDirectory() as temporary:
        built = build_small_model(Path(temporary) / "model")
        for file in sorted(built.iterdir(), key=lambda file: file.name == COMPLETE):
            shutil.copyfile(file, directory / file.name)
            (directory / file.name).chmod(0o644)
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1])
    sys.stdout.write(f"built the demo's model in {target}\n" if fill(target) else f"{target} already has a model\n")
