"""Measure the CPU that a proxy takes until it is ready: `python bench/startup.py`.

The first start of a model on a machine loads its tokenizer with transformers and checks its template; later starts
read what it kept. Both are measured, in a home directory of their own. Prints the seconds of the proxy and of its child
processes, and with --imports the packages whose import takes most of it. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import proxy_and_engine

from proxy import cpu_seconds

NUM_STARTS = 3


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(name: str) -> None:
    """Start a proxy, and print its CPU until it was ready."""
    with proxy_and_engine() as served:
        own = cpu_seconds(served.pid)
        children = sum(map(cpu_seconds, children_of(served.pid)))
    print(f"{name:12} {own:5.2f} s of the proxy, {children:5.2f} s of its child processes")


def print_imports() -> None:
    """Print the packages that take most of the time of the proxy's imports."""
    argv = [sys.executable, "-X", "importtime", "-c", "import proxy.main"]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]).stderr
    micros: collections.Counter[str] = collections.Counter()
    for line in lines.splitlines()[1:]:
        own, _, name = line.removeprefix("import time:").split("|")
        micros[name.strip().split(".")[0]] += int(own)
    for package, each in micros.most_common(12):
        print(f"{package:20} {each / 1e6:.2f} s")


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--imports", action="store_true", help="print what the imports take")
    if parser.parse_args().imports:
        print_imports()
        return
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        measure("first start")
        for _ in range(NUM_STARTS):
            measure("later start")


if __name__ == "__main__":
    main()
