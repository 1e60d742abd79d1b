#!/bin/sh
# Installs the packages of other projects, each into an environment of its own, for the tests here.
#
#   extras/adapters/tests/setup.sh [DIRECTORY]      the default is .adapters, where the tests look
#
# Harbor needs Python 3.12: PYTHON312 names one. An environment that cannot be made is left out, and its tests skip.
set -eu
cd "$(dirname "$0")/../../.."
target=${1:-.adapters}
python=${PYTHON:-python3}

install() { # NAME PIP-ARGUMENTS…
    name=$1
    shift
    "$target/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

make_environment() { # NAME INTERPRETER PACKAGE…
    name=$1 interpreter=$2
    shift 2
    if ! { "$interpreter" -m venv "$target/$name" && install "$name" "$@"; }; then
        echo "$name cannot be installed here; its tests are skipped" >&2
        rm -rf "${target:?}/$name"
    fi
}

# Harbor loads the plugin, so it gets the SDK's requirements too.
make_environment harbor "${PYTHON312:-python3.12}" \
    harbor==0.24.0 "click>=8.1" "httpx2>=2.16" "numpy>=1.26" "pydantic>=2.11" "pydantic-settings>=2.10"
make_environment verifiers "$python" verifiers==0.4.0
make_environment rllm "$python" rllm-model-gateway==0.1.0
# Of Trinity-RFT only its client is loaded, which needs little of what the package requires.
make_environment trinity "$python" requests httpx openai
install trinity --no-deps trinity-rft==0.6.0 || rm -rf "${target:?}/trinity"
make_environment areal "$python" aiohttp tenacity pydantic colorlog httpx openai
install areal --no-deps areal==1.0.4 || rm -rf "${target:?}/areal"
# Of OpenEnv the server and the generic client; the command-line tool and the web page need more.
make_environment openenv "$python" openai requests websockets fastapi uvicorn pydantic fastmcp
install openenv --no-deps openenv-core==0.3.0 || rm -rf "${target:?}/openenv"
# Of agent-lightning the emitter and its tracer; the processor that posts rewards needs the SDK's requirements.
make_environment agentlightning "$python" opentelemetry-sdk opentelemetry-exporter-otlp-proto-http \
    opentelemetry-instrumentation agentops fastapi pydantic openai aiohttp "httpx2>=2.16" "numpy>=1.26"
install agentlightning --no-deps agentlightning==0.3.0 || rm -rf "${target:?}/agentlightning"
# Of Open WebUI all but its models for search, speech and text recognition, which would load torch.
make_environment openwebui "$python" pip
install openwebui --no-deps open-webui==0.12.4 && "$target/openwebui/bin/python" - > "$target/openwebui/requires.txt" <<'EOF'
import importlib.metadata
models = ("accelerate", "faster-whisper", "opencv", "pyarrow", "rapidocr", "sentence-transformers")
required = importlib.metadata.requires("open-webui") or []
print("\n".join(each for each in required if "extra ==" not in each and not each.startswith(models)))
EOF
install openwebui -r "$target/openwebui/requires.txt" || rm -rf "${target:?}/openwebui"
