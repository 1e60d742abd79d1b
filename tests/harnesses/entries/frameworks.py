"""Frameworks in which agents are written, for Python and Node."""

import json
from collections.abc import Sequence

from harnesses.entry import Tool, dev, node_program, npm, pypi, python_program
from turnwise_fake_engine import Reply, ToolCall

TASK = Tool("delegate", "task")
SMOLAGENTS = (
    "It sends its calls back as text of the assistant (`Calling tools: …`), which the model did not sample: its next "
    "request extends no turn."
)
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""No download of prices at the start."""


def _final_answer(text: str) -> Reply:
    return Reply(text="Done.", tool_calls=[ToolCall(name="final_answer", arguments={"answer": text})])


def _code(lines: Sequence[str]) -> Reply:
    return Reply(text="\n".join(["I look.", "<code>", *lines, "</code>"]), finish_reason="stop")


def _bash_code(calls: Sequence[ToolCall]) -> Reply:
    return _code([f"print(bash({_command(call)!r}))" for call in calls])


def _command(call: ToolCall) -> str:
    return str(call.arguments["command"])


def _dspy(**fields: str) -> Reply:
    return Reply(text="\n\n".join([*(f"[[ ## {k} ## ]]\n{v}" for k, v in fields.items()), "[[ ## completed ## ]]"]))


def _dspy_calls(calls: Sequence[ToolCall]) -> Reply:
    arguments = json.dumps({"command": _command(calls[0])})
    return _dspy(next_thought="I look.", next_tool_name="bash", next_tool_args=arguments)


def _dspy_last(text: str) -> Reply:
    fields = {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": "{}"}
    return _dspy(**fields, reasoning="Done.", answer=text)


FRAMEWORKS = (
    dev("LangGraph", "langgraph", "`ChatOpenAI(base_url=…/v1)`", python_program("langgraph_agent"), delegate=TASK),
    pypi(
        "LangChain, ChatAnthropic",
        "langchain-anthropic",
        "`ChatAnthropic(base_url=…)` (no `/v1`)",
        python_program("langchain_anthropic_agent"),
        beside=("langchain",),
        dialect="messages",
    ),
    dev(
        "OpenAI Agents SDK",
        "openai-agents",
        "`OPENAI_BASE_URL=…/v1` or `AsyncOpenAI(base_url=…/v1)`",
        python_program("openai_agents"),
        dialect="responses",
        delegate=Tool("delegate", "input"),
    ),
    dev(
        "pydantic-ai",
        "pydantic-ai-slim",
        "`OPENAI_BASE_URL=…/v1` or `OpenAIProvider(base_url=…/v1)`",
        python_program("pydantic_ai_agent"),
        delegate=TASK,
    ),
    dev(
        "smolagents, ToolCallingAgent",
        "smolagents",
        "`OpenAIModel(api_base=…/v1)`",
        python_program("smolagents_tools"),
        last=_final_answer,
        delegate=Tool("expert", "task"),
        remark=SMOLAGENTS
        + " It requires a call in every reply, so a real engine cannot sample the long text of the check `client "
        "gone`; in front of the fake engine the check holds.",
    ),
    dev(
        "smolagents, CodeAgent",
        "smolagents",
        "`OpenAIModel(api_base=…/v1)`",
        python_program("smolagents_code"),
        ask=_bash_code,
        remark=SMOLAGENTS,
        last=lambda text: _code([f"final_answer({text!r})"]),
        offers_tools=False,
    ),
    pypi(
        "DSPy",
        "dspy",
        "`dspy.LM(api_base=…/v1)`, model `openai/NAME`",
        python_program("dspy_react"),
        ask=_dspy_calls,
        remark="Each of its steps is a new prompt without the earlier replies, by design: one chain for each call.",
        last=_dspy_last,
        offers_tools=False,
        environment=LITELLM,
    ),
    pypi(
        "CrewAI",
        "crewai",
        "`LLM(base_url=…/v1)`, model `openai/NAME`",
        python_program("crewai_crew"),
        remark="It drops the text beside a tool call when it sends a reply back.",
        environment={
            "CREWAI_DISABLE_TELEMETRY": "true",
            "OTEL_SDK_DISABLED": "true",
            "CREWAI_TRACING_ENABLED": "false",
        },
    ),
    pypi(
        "AutoGen",
        "autogen-agentchat",
        "`OPENAI_BASE_URL=…/v1` or `OpenAIChatCompletionClient(base_url=…/v1)`",
        python_program("autogen_agent"),
        beside=("autogen-ext[openai]",),
    ),
    pypi(
        "LlamaIndex",
        "llama-index-core",
        "`OpenAILike(api_base=…/v1)`",
        python_program("llama_index_agent"),
        beside=("llama-index-llms-openai-like",),
    ),
    pypi(
        "Google ADK",
        "google-adk",
        "`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`), or LiteLLM's `api_base=…/v1`",
        python_program("google_adk"),
        dialect="gemini",
        delegate=Tool("delegate", "request"),
    ),
    pypi(
        "Strands",
        "strands-agents",
        '`OpenAIModel(client_args={"base_url": …/v1})`',
        python_program("strands_agent"),
        beside=("openai",),
        delegate=TASK,
    ),
    pypi("Agno", "agno", "`OpenAILike(base_url=…/v1)`", python_program("agno_agent"), beside=("openai",)),
    pypi("Haystack", "haystack-ai", "`OpenAIChatGenerator(api_base_url=…/v1)`", python_program("haystack_agent")),
    pypi(
        "OpenHands SDK",
        "openhands-sdk",
        "`LLM(base_url=…/v1)`, model `openai/NAME`",
        python_program("openhands_conversation"),
        beside=("openhands-tools",),
        python=">=3.12",
        tool=Tool("terminal"),
        environment=LITELLM,
    ),
    npm(
        "Vercel AI SDK",
        "ai",
        "`createOpenAICompatible({baseURL: …/v1})`",
        node_program("ai_sdk_chat"),
        beside=("@ai-sdk/openai-compatible", "zod"),
    ),
    npm(
        "Vercel AI SDK, `openai()`",
        "ai",
        "`createOpenAI({baseURL: …/v1})` or `OPENAI_BASE_URL=…/v1`",
        node_program("ai_sdk_responses"),
        beside=("@ai-sdk/openai", "zod"),
        dialect="responses",
    ),
    npm(
        "OpenAI Agents JS",
        "@openai/agents",
        "`OPENAI_BASE_URL=…/v1` or `new OpenAI({baseURL})`",
        node_program("openai_agents"),
        beside=("zod",),
        dialect="responses",
        delegate=Tool("delegate", "input"),
    ),
    npm(
        "Mastra",
        "@mastra/core",
        'model `{id: "provider/NAME", url: …/v1}`',
        node_program("mastra_agent"),
        beside=("zod",),
    ),
)
