"""`python -m turnwise.demo.model_directory DIRECTORY`: fill a directory with the demo's model, once.

For a container's volume, which is a directory that exists and cannot be renamed: the model is built elsewhere and its
files are copied, the configuration last, because its presence says that the model is complete.
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
    sys.stdout.write(f"built the demo's model in {target}\n" if fill(target) else f"{target} has a model already\n")
