#!/bin/sh
# Makes the environment in which the original classes of Trinity-RFT run beside ours, and verl takes our batches.
#
# Both pin versions of torch, transformers and vLLM that cannot stand in the project's own environment, and the classes
# compared need none of these pins. So they are installed without their dependencies, and see the project's packages
# through a .pth file; what they import beyond that is listed here.
#
#   tests/conformance/setup.sh [DIRECTORY]      the default is .conformance, where the tests look
set -eu
cd "$(dirname "$0")/../.."
target=${1:-.conformance}
python=${PYTHON:-.venv/bin/python}

"$python" -m venv "$target"
shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$shared" > "$own/project.pth"
"$target/bin/python" -m pip install --quiet --no-deps \
    trinity-rft==0.6.0 verl==0.9.1 \
    absl-py antlr4-python3-runtime==4.9.* cloudpickle codetiming datasets dill importlib_metadata \
    latex2sympy2_extended math-verify msgpack multiprocess omegaconf orjson pandas pyarrow pybase64 python-dateutil pytz \
    pyvers "ray>=2.50" six sortedcontainers tensorboard tensordict==0.10.0 tzdata xxhash
"$target/bin/python" tests/conformance/originals.py versions
