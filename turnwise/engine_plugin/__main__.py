"""`python -m turnwise.engine_plugin DIRECTORY`: write the plug-in for a vLLM of another environment.

That vLLM, as one in vLLM's own image, finds it with `PYTHONPATH=DIRECTORY`. The directory has this
package alone, which needs nothing but vLLM.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import turnwise
from turnwise.engine_plugin import BACKEND, PLUGIN_GROUP


def write_plugin(directory: Path) -> None:
    """Write the package and the entry point by which vLLM finds it; replace an older one."""
    source, name = Path(__file__).parent, f"turnwise_plugin-{turnwise.__version__}"
    shutil.rmtree(directory / "turnwise", ignore_errors=True)
    for stale in directory.glob("turnwise_plugin-*.dist-info"):
        shutil.rmtree(stale)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, directory / "turnwise" / source.name, ignore=ignored)
    shutil.copyfile(source.parent / "__init__.py", directory / "turnwise" / "__init__.py")
    info = directory / f"{name}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: turnwise-plugin\nVersion: {turnwise.__version__}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(
        f"[{PLUGIN_GROUP}]\n{BACKEND} = turnwise.engine_plugin:register\n", encoding="utf-8"
    )


if __name__ == "__main__":
    write_plugin(Path(sys.argv[1]))
    sys.stdout.write(f"the plug-in is in {sys.argv[1]}\n")
