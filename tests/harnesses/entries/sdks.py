"""SDKs of model providers, for Python and Node."""

from harnesses.entry import dev, node_program, npm, pypi, python_program

OPENAI = "`OPENAI_BASE_URL=…/v1` or `base_url=`"
ANTHROPIC = "`ANTHROPIC_BASE_URL=…` (no `/v1`) or `base_url=`"
GOOGLE = "`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`) or `http_options=`"

SDKS = (
    dev("openai (Python)", "openai", OPENAI, python_program("openai_chat")),
    dev("openai (Python), Responses API", "openai", OPENAI, python_program("openai_responses"), dialect="responses"),
    dev("anthropic (Python)", "anthropic", ANTHROPIC, python_program("anthropic_messages"), dialect="messages"),
    dev("google-genai (Python)", "google-genai", GOOGLE, python_program("google_genai"), dialect="gemini"),
    pypi(
        "LiteLLM",
        "litellm",
        "`OPENAI_API_BASE=…/v1` or `api_base=`, model `openai/NAME`",
        python_program("litellm_loop"),
        beside=("mcp",),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    npm("openai (Node)", "openai", "`OPENAI_BASE_URL=…/v1` or `baseURL`", node_program("openai_chat")),
    npm(
        "anthropic (Node)",
        "@anthropic-ai/sdk",
        "`ANTHROPIC_BASE_URL=…` (no `/v1`) or `baseURL`",
        node_program("anthropic_messages"),
        dialect="messages",
    ),
    npm(
        "google-genai (Node)",
        "@google/genai",
        "`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`) or `httpOptions.baseUrl`",
        node_program("google_genai"),
        dialect="gemini",
    ),
)
