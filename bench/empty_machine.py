"""What the first commands cost on a machine that has nothing: `python bench/empty_machine.py .venv/.real .venv/.dev`.

Makes the targets one after the other (the set-ups of `make demo` and `make test`, or `demo` itself) in a fresh clone,
with no variable but PATH and an empty HOME, so pip asks the index that it asks by itself. `--keep PIP_FIND_LINKS`
leaves a variable that names another one. Prints what make says, and of each target its time, what the machine has
received meanwhile, and what lies in .venv. Files of an index on this disk are not received.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def num_bytes(directory: Path) -> int:
    return sum(each.lstat().st_size for each in directory.rglob("*") if each.is_file())


def received() -> int:
    """Return the bytes that all networks but the loopback have brought since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--directory", type=Path, required=True, help="a new directory, which is left")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME", help="leave this variable")
    given = parser.parse_args()
    home, clone = given.directory.absolute() / "home", given.directory.absolute() / "clone"
    home.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/bin"])
    environment = {name: os.environ[name] for name in given.keep} | {"PATH": path, "HOME": str(home)}
    for target in given.targets:
        started, before = time.monotonic(), received()
        done = subprocess.run(["make", target], check=False, cwd=clone, env=environment)
        seconds, loaded, made = time.monotonic() - started, received() - before, num_bytes(clone / ".venv")
        said = f"{seconds:.0f} s, {loaded / 1e9:.2f} GB received, {made / 1e9:.2f} GB in .venv"
        print(f"make {target}: status {done.returncode}, {said}", flush=True)
        if done.returncode:
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
