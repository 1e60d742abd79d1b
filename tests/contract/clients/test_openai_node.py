"""openai-node through the proxy."""

import shutil
import subprocess
from pathlib import Path

from support.waiting import WAIT_SECONDS

NUM_CHECKS = 11
SUITE = Path(__file__).with_name("node_suite.mjs")


def test_openai_node_passes_every_check(proxy, node_project):
    suite = shutil.copy(SUITE, node_project)
    done = subprocess.run(
        ["node", suite, proxy.v1], cwd=node_project, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == NUM_CHECKS, done.stdout
