"""`python -m turnwise.engine_plugin.mend_torchvision`: let torchvision be imported beside another build of torch.

PyPI's torchvision is compiled for the CUDA build of torch. Beside the CPU build its compiled part is not loaded, and
the import ends at two operators that nobody declared. vLLM and transformers use its Python part alone, for many
models with images and for Qwen3.5 without any. So the installed package declares the two operators first.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

MARK = "# Declared by Turnwise: the compiled part of this build does not load beside the installed torch.\n"
SCHEMAS = (
    MARK
    + "import torch as _torch\n"
    + '_declared = _torch.library.Library("torchvision", "DEF")\n'
    + 'for _name in ("nms", "qnms"):\n'
    + '    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
)


def installed() -> Path | None:
    """Return torchvision's first file; None where it is not installed. Nothing is imported."""
    spec = importlib.util.find_spec("torchvision")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def is_mended(file: Path) -> bool:
    return file.read_text(encoding="utf-8").startswith(MARK)


def mend(file: Path) -> None:
    if not is_mended(file):
        file.write_text(SCHEMAS + file.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    found = installed()
    if found is None:
        sys.exit("torchvision is not installed here")
    mend(found)
    sys.stdout.write(f"{found} declares its operators\n")
