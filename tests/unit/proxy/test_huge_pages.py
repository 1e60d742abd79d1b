"""Memory that is moved into huge pages keeps its content, and the process takes hardly more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MOVE = """
import hashlib, json, re
from pathlib import Path
from proxy.http.huge_pages import use_huge_pages

def kilobytes(field):
    return int(re.search(rf"^{field}: +([0-9]+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])

def digest():
    return hashlib.sha256(repr(texts).encode()).hexdigest()

texts = [f"text {number} " * 8 for number in range(200_000)]
before, resident = digest(), kilobytes("Rss")
num_moved = use_huge_pages()
grown = kilobytes("Rss") - resident
print(json.dumps([num_moved, kilobytes("AnonHugePages"), grown, digest() == before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are requested on Linux only")
def test_the_memory_of_a_process_is_moved_into_huge_pages_unchanged():
    ran = subprocess.run([sys.executable, "-c", MOVE], check=True, capture_output=True, text=True)
    num_moved, huge_kilobytes, grown_kilobytes, is_unchanged = json.loads(ran.stdout)
    assert is_unchanged
    if not num_moved:
        pytest.skip("this system gives no huge pages: it has a kernel before Linux 6.1, or none free")
    assert huge_kilobytes > 0
    assert grown_kilobytes <= num_moved * 2048 * 0.1 + 4096
