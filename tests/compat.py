"""`make compat`: the first tier with the lowest allowed version of each direct dependency, and with the newest."""

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("store", "proxy", "trainer", "vision", "export", "otel")
"""What the programs are made of. The engine has its own pins, and an environment of its own where they differ."""
TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-rerunfailures",
    "pytest-xdist",
    "hypothesis",
    "pyyaml",
    "kubernetes-validate",
    "compressed-tensors",
    "xgrammar",
)  # the last two come with vLLM; trainers read quantised weights and apply grammars by them
OF_OTHERS = (
    *("test_engine_command.py", "proxy/test_placed_images.py"),  # they import vLLM
    *("test_tokenizer.py", "proxy/test_templates_of_many_families.py"),  # they read the templates that TRL ships
)
"""Tests of what is not installed here."""
CLIENTS = ("openai", "anthropic", "google-genai<3")  # the newest needs a newer pydantic than the lowest
REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,]+\])?(?:>=|==)([\w.]+)")


def direct_dependencies() -> Iterator[tuple[str, str]]:
    """Yield each direct dependency with its lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *(each for extra in EXTRAS for each in optional[extra])):
        if (found := REQUIREMENT.match(requirement)) is not None:
            yield found[1], found[2]


def prepare(directory: Path, bound: str, python: str | None) -> Path:
    """Make an environment with the lowest or newest versions, print them, and return its interpreter."""
    interpreter = directory / "bin" / "python"
    if python is None:
        venv.create(directory, with_pip=True, clear=True)
    else:
        subprocess.run([python, "-m", "venv", "--clear", directory], check=True)
    constraints = directory / "constraints.txt"
    pins = sorted({f"{name}=={version}" for name, version in direct_dependencies()}) if bound == "lowest" else []
    constraints.write_text("".join(f"{pin}\n" for pin in pins))
    pip = [interpreter, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "pip>=25"], check=True)
    wanted = ["--editable", f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS, *CLIENTS]
    subprocess.run([*pip, "install", "--no-compile", "--constraint", constraints, *wanted], check=True)
    names = {name.lower().replace("_", "-") for name, _ in direct_dependencies()}
    frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout.split()
    print(bound, *(line for line in frozen if line.partition("==")[0].lower().replace("_", "-") in names), flush=True)
    return interpreter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bounds", nargs="*", default=["lowest", "newest"])
    parser.add_argument("--python", help="interpreter of the environments, by default this one")
    parser.add_argument("--keep", action="store_true", help="run the tests in the environments that are there")
    given = parser.parse_args()
    failed = False
    for bound in given.bounds:
        directory = ROOT / ".compat" / bound
        kept = given.keep and (directory / "bin" / "python").exists()
        interpreter = directory / "bin" / "python" if kept else prepare(directory, bound, given.python)
        left_out = [f"--ignore=tests/unit/{each}" for each in OF_OTHERS]
        command = [interpreter, "-m", "pytest", "-q", "-n", "2", "tests/unit", "-m", "not slow and not postgres"]
        command += left_out
        failed |= subprocess.run(command, cwd=ROOT, env=os.environ, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
