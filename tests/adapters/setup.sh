#!/bin/sh
# Installs the packages of other projects, each into an environment of its own, for the tests of turnwise/adapters.
#
#   tests/adapters/setup.sh [DIRECTORY]      the default is .adapters, where the tests look
#
# Harbor needs Python 3.12: PYTHON312 names one. An environment that cannot be made is left out, and its tests skip.
set -eu
cd "$(dirname "$0")/../.."
target=${1:-.adapters}
sdk="click>=8.1 httpx2>=2.16 numpy>=1.26 pydantic>=2.11 pydantic-settings>=2.10"

make_environment() { # NAME INTERPRETER PACKAGE…
    name=$1 interpreter=$2
    shift 2
    # shellcheck disable=SC2086
    if "$interpreter" -m venv "$target/$name" && "$target/$name/bin/python" -m pip install --quiet "$@" $sdk; then
        touch "$target/$name/.installed"
    else
        echo "$name cannot be installed here; its tests are skipped" >&2
    fi
}

make_environment harbor "${PYTHON312:-python3.12}" harbor==0.24.0
make_environment verifiers "${PYTHON:-python3}" verifiers==0.4.0
make_environment rllm "${PYTHON:-python3}" rllm-model-gateway==0.1.0
