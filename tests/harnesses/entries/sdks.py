"""SDKs of model providers, for Python and Node."""

from __future__ import annotations

from harnesses.entry import Harness, node_program, python_program

OPENAI = "`OPENAI_BASE_URL=…/v1` or `base_url=`"
ANTHROPIC = "`ANTHROPIC_BASE_URL=…` (no `/v1`) or `base_url=`"
GOOGLE = "`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`) or `http_options=`"

SDKS = (
    Harness(
        name="openai (Python)",
        installer="dev",
        package="openai",
        dialect="chat",
        pointing=OPENAI,
        argv=python_program("openai_chat"),
    ),
    Harness(
        name="openai (Python), Responses API",
        installer="dev",
        package="openai",
        dialect="responses",
        pointing=OPENAI,
        argv=python_program("openai_responses"),
    ),
    Harness(
        name="anthropic (Python)",
        installer="dev",
        package="anthropic",
        dialect="messages",
        pointing=ANTHROPIC,
        argv=python_program("anthropic_messages"),
    ),
    Harness(
        name="google-genai (Python)",
        installer="dev",
        package="google-genai",
        dialect="gemini",
        pointing=GOOGLE,
        argv=python_program("google_genai"),
    ),
    Harness(
        name="LiteLLM",
        installer="pypi",
        package="litellm",
        beside=("mcp",),
        dialect="chat",
        pointing="`OPENAI_API_BASE=…/v1` or `api_base=`, model `openai/NAME`",
        argv=python_program("litellm_loop"),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Harness(
        name="openai (Node)",
        installer="npm",
        package="openai",
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1` or `baseURL`",
        argv=node_program("openai_chat"),
    ),
    Harness(
        name="anthropic (Node)",
        installer="npm",
        package="@anthropic-ai/sdk",
        dialect="messages",
        pointing="`ANTHROPIC_BASE_URL=…` (no `/v1`) or `baseURL`",
        argv=node_program("anthropic_messages"),
    ),
    Harness(
        name="google-genai (Node)",
        installer="npm",
        package="@google/genai",
        dialect="gemini",
        pointing="`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`) or `httpOptions.baseUrl`",
        argv=node_program("google_genai"),
    ),
)
