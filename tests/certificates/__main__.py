"""`make certify`: docs/models.md, from tiny models of today's architectures.

`make certify ARGS="NAME …"` does some of them and keeps the other rows; `ARGS="--loads NAME …"` only loads an adapter
and whole weights into vLLM, in a tenth of the time. `rows.json` has what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from certificates.tiny import TINY, architecture_of, build

from turnwise.commands.certify import FILE, LIMITS, Certificate

ROWS = Path(__file__).with_name("rows.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODELS = Path(__file__).parents[2] / "runs" / "certify" / "models"
HEAD = """# Models

`make certify` writes this page, on a CPU, from tiny random models that have the classes and names of the official
checkpoints. *Whole product*: `turnwise certify` served the model, trained it by GRPO and DPO, loaded, rolled back and
loaded each version again, also into an engine that was restarted
([verify.md](verify.md#a-model-before-a-long-training)). *Loaded*: a random adapter, and random weights twice, were
loaded into vLLM. A number is the largest difference of a token's logprob from a forward pass of transformers, in nats;
in bfloat16 it is the mean one. vLLM computes gated delta nets on a CPU in bfloat16 alone. Right is at most 1e-4 in
float32 and 0.1 in bfloat16. "–" was not measured.

`turnwise doctor --model DIR` says before a start whether a model can be served and trained, and what an adapter
changes.

| architecture | numbers | adapter: loaded | weights: loaded | adapter: whole product | weights: whole product |
|---|---|---|---|---|---|
"""
NOTES = """
On a CPU, vLLM has no kernel for adapters of mixtures of experts: `turnwise engine --lora` refuses them. Adapters never
change routers, the experts of a mixture, the last layers of Mamba's mixers, or vision towers. Images are served by vLLM
and not trained. An engine with `--lora` does not load whole weights of Granite 4. LFM2 is computed otherwise by vLLM's
CPU build before anything is loaded; the trainer's comparison of logprobs refuses its sessions.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for name in given.names or TINY:
        directory = build(name, MODELS / name)
        row = rows.setdefault(name, {})
        row["architecture"] = architecture_of(directory)
        if given.loads:
            row["loads"] = loads(name, directory)
        else:
            row["kinds"] = whole_product(name, directory)
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))
        sys.stdout.write(f"{line(row)}\n")


def loads(name: str, directory: Path, *more: str) -> dict[str, Any]:
    """Return the differences by what was loaded; empty where vLLM does not serve the model here."""
    flags = ["language_model_only=true"] if TINY[name].vision is not None else []
    argv = [sys.executable, "-m", "certificates.loads", str(directory), *flags, *more]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, env=environment())
    found = dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}
    return found if more or "weights again" in found else found | loads(name, directory, "adapters=false")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROWS.parents[1]}"}


def whole_product(name: str, directory: Path) -> dict[str, Any]:
    flags = ["--", "--language-model-only"] if TINY[name].vision is not None else []
    (directory / FILE).unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "turnwise", "certify", str(directory), *flags], check=False)
    found = Certificate.read(str(directory))
    kinds = [] if found is None else found.kinds
    return {each.kind: each.refused or each.gap() for each in kinds if each.verdict() != "not measured"}


def page(rows: dict[str, Any]) -> str:
    return HEAD + "".join(f"{line(rows[name])}\n" for name in TINY if name in rows) + NOTES


def line(row: dict[str, Any]) -> str:
    measured, kinds = row.get("loads", {}), row.get("kinds", {})
    dtype = measured.get("dtype", "float32")
    field = "max" if dtype == "float32" else "mean"
    weights = [measured[each][field] for each in ("weights", "weights again") if each in measured]
    cells = [measured.get("adapter", {}).get(field), max(weights, default=None), kinds.get("lora"), kinds.get("full")]
    return f"| {row['architecture']} | {dtype} | " + " | ".join(shown(each, dtype) for each in cells) + " |"


def shown(value: float | str | None, dtype: str) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.1e}" if value <= LIMITS[dtype] else f"**wrong** {value:.1e}"


if __name__ == "__main__":
    main()
