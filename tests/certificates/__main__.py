"""`make certify`: docs/models.md, from tiny models of today's architectures.

`make certify ARGS="NAME …"` does some of them and keeps the other rows; `ARGS="--loads NAME …"` only loads an adapter
and whole weights into vLLM, in a tenth of the time, and `ARGS="--learns NAME …"` only trains the tiny task of
`bench/learning`. A name may be the directory of another model. `rows.json` has what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from certificates.loads import LIMITS
from certificates.tiny import TINY, architecture_of, build, environment
from harnesses.verdicts import present_commit

from turnwise.commands.features.certify.certificate import Certificate
from turnwise.processes.served_model import CPU_HEAD_SIZES

ROWS = Path(__file__).with_name("rows.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODELS = Path(__file__).parents[2] / "runs" / "certify" / "models"
MEASURED = ("turnwise", "trainer", "tests/certificates/*.py")
"""The code that a row depends on, as git takes it."""
KINDS = {"lora": "adapter", "full": "weights"}
RATES = {"dpo": {"learning_rate": 2e-3}}
"""Settings of the tiny task that differ for these models, which are larger than the benchmark's own. DPO clips no step:
with the benchmark's 5e-3 a group's sessions of Phi-3 are alike before they are right, in plain PyTorch too."""
MAX_UPDATES = 60
"""Of the tiny task; gated delta nets need more than the benchmark's own model."""
NAMED = re.compile(r"^turnwise: |(?<=the model) '/[^']*' \(\w+\)")
"""What a reason says of one model alone."""
HEAD_SIZES = ", ".join(map(str, CPU_HEAD_SIZES))
HEAD = """# Models

`make certify` writes this page, on a CPU, from tiny random models that have the classes and names of the official
checkpoints. `turnwise certify` served each, trained it by GRPO and DPO, loaded, rolled back and loaded each version
again ([checks](exactness.md#a-model-before-a-long-training)); with `*`, a random adapter and random weights were only
loaded into vLLM. A number is the largest difference of a token's logprob from a forward pass of transformers, in nats,
which must be at most 1e-4; in bfloat16 it is the mean one, at most twice what the format itself rounds, or 0.1 with
`*`. *Learning* is the share of right tokens before
and after the tiny task of `bench/learning`, where 0.85 is learned. "–" was not measured.

The last column is the commit of a row's numbers, and of its learning where no other is beside it. Only rows of 7806bd5b
and later commits have all that `turnwise certify` tries now: earlier ones lack the text that is longer than a window,
the weights that are changed at random before the training, and the limit in bfloat16 of twice what the format rounds.

`turnwise doctor --model DIR` says before a start whether a model can be served and trained, why it is refused, and what
an adapter changes. Most refusals below are of vLLM on a CPU.

| architecture | adapter | weights | learning | commit |
|---|---|---|---|---|
"""
NOTES = f"""
[trainer.md](trainer.md#memory) says which layers an adapter changes. On a CPU, LFM2, and prompts of Mamba 2 that are
longer than a block, need Turnwise's plug-in in vLLM.

On a CPU vLLM computes attention heads of size {HEAD_SIZES}; gated delta nets and
quantised weights in bfloat16 alone, and no mixtures of these; no latent attention, no selective scan of Mamba 1, and no
adapters of mixtures. `doctor` refuses what is beyond that.

Gemma 3n's text class is refused on any machine, because vLLM departs from transformers: it leaves out the
embeddings of each layer (0.3 nats), and the factor before the norm of what is added to them. Attention, AltUp,
Laurel, sparse MLPs and shared keys agree. The class with images has the embeddings, and wants `timm`.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--learns", action="store_true")
    parser.add_argument("--kind", action="append", choices=["full", "lora"])
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    for name in given.names or TINY:
        directory = build(name, MODELS / name) if name in TINY else Path(name)
        found: dict[str, Any] = {"learns": learns(name)} if given.learns else {}
        found |= {"loads": loads(name, directory)} if given.loads else {}
        kinds = {} if found else whole_product(name, directory, given.kind or ["full", "lora"])
        rows = json.loads(ROWS.read_text())
        row = rows.setdefault(directory.name, {})
        if given.learns:
            row["learns_at"] = present_commit(MEASURED)
        elif not (given.loads and row.get("kinds")):  # a row shows what was certified
            if "learns" in row:
                row.setdefault("learns_at", row["commit"])
            row["commit"] = present_commit(MEASURED)
        row |= {"architecture": architecture_of(directory), **found, "kinds": row.get("kinds", {}) | kinds}
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))
        sys.stdout.write(f"{line(row)}\n")


def loads(name: str, directory: Path) -> dict[str, Any]:
    """Return the differences by what was loaded; empty where vLLM does not serve the model here."""
    flags = ["language_model_only=true"] if TINY[name].vision is not None else []
    argv = [sys.executable, "-m", "certificates.loads", str(directory), *flags]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, env=environment(name))
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}


def learns(name: str) -> dict[str, str]:
    """Return the share of right tokens before and after the tiny task of `bench/learning`, by algorithm."""
    sys.path.insert(0, str(ROWS.parents[2] / "bench" / "learning"))
    tiny, recipes = (importlib.import_module(module) for module in ("tiny", "recipes"))
    found = {}
    for algorithm in ("grpo", "dpo"):
        with tempfile.TemporaryDirectory() as place:
            pad = 0 if name == "gemma4" else None  # which embeds the places of images as padding
            sizes = {"vocab_size": recipes.VOCABULARY, "eos_token_id": 0, "pad_token_id": pad}
            model, recipe = build(name, Path(place) / "model", **sizes), recipes.RECIPES[algorithm]
            recipe = dataclasses.replace(recipe, tiny=recipe.tiny | RATES.get(algorithm, {}))
            bounds = {"max_updates": MAX_UPDATES, "model": model}
            learnt = tiny.learn_tiny(algorithm, recipe, 0, Path(place), lambda *_: None, **bounds)
        found[algorithm] = f"{learnt.before:.2f} → {learnt.after:.2f}"
        sys.stdout.write(f"{name} {algorithm}: {found[algorithm]}, {learnt.cpu_seconds:.0f} s of CPU\n")
    return found


def whole_product(name: str, directory: Path, wanted: list[str]) -> dict[str, Any]:
    """Return the dtype and the gap by kind, or why it was refused, and whether that was at the start."""
    flags = ["--", "--language-model-only"] if name in TINY and TINY[name].vision is not None else []
    kinds = [flag for kind in wanted for flag in ("--kind", kind)]
    argv = [sys.executable, "-m", "turnwise", "certify", str(directory), *kinds, *flags]
    subprocess.run(argv, check=False, env=environment(name))
    found = Certificate.read(str(directory))
    return {
        each.kind: {
            "dtype": each.dtype,
            "refused": each.refused and NAMED.sub("", each.refused),
            "gap": each.gap() if each.stages else None,
            "is_wrong": each.verdict() == "wrong",
        }
        for each in (() if found is None else found.kinds)
        if each.kind in wanted and each.verdict() != "not measured"
    }


def page(rows: dict[str, Any]) -> str:
    known = [rows[name] for name in TINY if name in rows]
    real = [row | {"architecture": f"{row['architecture']}: {name}"} for name, row in rows.items() if name not in TINY]
    return HEAD + "".join(f"{line(row)}\n" for row in known + real) + NOTES


def line(row: dict[str, Any]) -> str:
    measured, kinds = row.get("loads", {}), row["kinds"]
    dtype = measured.get("dtype") or next((each["dtype"] for each in kinds.values()), "float32")
    field = "max" if dtype == "float32" else "mean"
    weights = [measured[each][field] for each in ("weights", "weights again") if each in measured]
    loaded = {"lora": measured.get("adapter", {}).get(field), "full": max(weights, default=None)}
    name = row["architecture"] + (f", {dtype}" if dtype != "float32" else "")
    cells = [tried(kinds.get(kind), loaded[kind], dtype) for kind in KINDS]
    learned = ", ".join(f"{key.upper()} {value}" for key, value in row.get("learns", {}).items())
    learned += f" (`{row['learns_at']}`)" if row.get("learns_at", row["commit"]) != row["commit"] else ""
    return f"| {name} | " + " | ".join(cells) + f" | {learned} | `{row['commit']}` |"


def tried(result: dict[str, Any] | None, loaded: float | None, dtype: str) -> str:
    if result is None:
        return "–" if loaded is None else f"{shown(loaded, dtype)}*"
    if result["refused"] is None:
        shown_gap = shown(result["gap"], result["dtype"])
        return f"**wrong** {shown_gap}" if result.get("is_wrong") and "wrong" not in shown_gap else shown_gap
    return "refused" if result["gap"] is None else "**refused** after the start"


def shown(value: float, dtype: str) -> str:
    return f"{value:.1e}" if value <= LIMITS[dtype] else f"**wrong** {value:.1e}"


if __name__ == "__main__":
    main()
