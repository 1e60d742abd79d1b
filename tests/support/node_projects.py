"""A directory in which node finds openai-node, for the tests that run JavaScript.

It is made from the example's `package.json`, so every test runs the version that the example pins. npm installs it
once, outside the checkout.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.waiting import WAIT_SECONDS

PACKAGE = Path(__file__).parents[2] / "examples" / "openai_node" / "package.json"


@pytest.fixture(scope="session")
def node_project() -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("OPENAI-NODE IS NOT TESTED: install node 20 or later with npm to run this")
    version = json.loads(PACKAGE.read_text())["dependencies"]["openai"]
    directory = Path(tempfile.gettempdir()) / f"turnwise-node-{os.getuid()}-{version}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not (directory / "node_modules" / "openai" / "package.json").is_file():
        shutil.copy(PACKAGE, directory)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
        if done.returncode != 0:
            pytest.skip(f"OPENAI-NODE IS NOT TESTED: npm could not install it: {done.stderr[-300:]}")
    return directory
