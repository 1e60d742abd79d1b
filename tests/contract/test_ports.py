"""The ports that tests give to their servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.ports import free_port, own_ports

OF_ANOTHER_RUN = "from support.ports import free_port, own_ports; print(free_port(), own_ports().start)"


def test_the_process_of_another_run_on_this_machine_gets_ports_of_its_own():
    """Both are the first worker of their run, or run without workers."""
    assert free_port() in own_ports()
    tests = Path(__file__).parents[1]
    program = f"import sys; sys.path[:0] = {[str(tests), str(tests.parent)]}; {OF_ANOTHER_RUN}"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    port, start = map(int, output.split())
    assert port not in own_ports()
    assert start != own_ports().start
