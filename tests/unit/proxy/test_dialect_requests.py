"""Requests in the shapes that the formats' own documents allow, translated to chat messages and sampling parameters."""

import re
import typing
from typing import Any

import pytest
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content
from google.genai.types import Part, Tool
from openai.types.responses.response_input_content_param import ResponseInputContentParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from proxy.dialects.base import Call
from proxy.dialects.chat import ChatCompletions
from proxy.features.formats.gemini import Gemini
from proxy.features.formats.messages import Messages
from proxy.features.formats.responses import Responses
from turnwise.errors import InvalidRequest


def messages_call(*messages: dict[str, Any]) -> Call:
    return Messages().parse({"max_tokens": 9, "messages": list(messages)})


def gemini_call(**body: Any) -> Call:
    return Gemini().parse({"model": "m", "stream": False, **body})


def test_consecutive_messages_of_a_role_are_one_message():
    """Several clients send one reply back as two messages, its text and its call."""
    text = {"type": "text", "text": "Let me look."}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {"n": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
    asked = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    one = messages_call(
        *asked,
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    )
    two = messages_call(
        *asked,
        {"role": "assistant", "content": "Let me look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "go on"},
    )
    assert two.messages == one.messages
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "user"]
    assert one.messages[0]["content"] == "a\nb"


def test_google_s_own_bodies_with_objects_for_lists_and_strings_for_numbers_are_read():
    """Protobuf's JSON allows both, and Google's examples for curl use them."""
    declared = {"name": "look", "parameters": {"type": "OBJECT", "properties": {}}}
    call = gemini_call(
        contents={"role": "USER", "parts": {"text": "Hi."}},
        tools={"function_declarations": declared},
        generationConfig={
            "temperature": "0.5",
            "maxOutputTokens": "30",
            "seed": "0",
            "topK": "5",
            "candidateCount": "2",
        },
    )
    assert call.messages == [{"role": "user", "content": "Hi."}]
    assert call.num_choices == 2
    expected = {"temperature": 0.5, "max_completion_tokens": 30, "seed": 0, "top_k": 5, "n": 2}
    assert expected.items() <= call.body.items()
    assert call.tools[0]["function"]["name"] == "look"
    with pytest.raises(InvalidRequest, match="`temperature` is a number"):
        gemini_call(contents=[{"parts": [{"text": "Hi."}]}], generationConfig={"temperature": "warm"})


def test_a_whole_number_that_is_written_as_a_fraction_is_an_integer():
    """As in protobuf's JSON; the engine refuses 2.0 candidates."""
    config = {"candidateCount": 2.0, "maxOutputTokens": "3e1", "topK": 5.0, "seed": 7.0, "temperature": 1.0}
    body = gemini_call(contents={"parts": {"text": "Hi."}}, generationConfig=config).body
    found = [body[field] for field in ("n", "max_completion_tokens", "top_k", "seed", "temperature")]
    assert found == [2, 30, 5, 7, 1.0]
    assert [type(each) for each in found] == [int, int, int, int, float]


SAID_USER = {"role": "user", "content": "Hi."}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
USE = {"type": "tool_use", "id": "c", "name": "look"}
Request = tuple[Any, dict[str, Any]]


def said(*content: Any, role: str = "user", **fields: Any) -> Request:
    return Messages(), {"max_tokens": 9, "messages": [{"role": role, "content": list(content)}], **fields}


def items(*given: Any, **fields: Any) -> Request:
    return Responses(), {"input": list(given), **fields}


def parts(*given: Any, role: str = "user", **fields: Any) -> Request:
    return Gemini(), {"contents": [{"role": role, "parts": list(given)}], **fields}


HI = {"type": "text", "text": "Hi."}
PNG = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
NO_IMAGE = "a block of type 'image' cannot be served here; send text"
LOST: list[tuple[Request, str]] = [
    *((said({**USE, "input": bad}, role="assistant"), "`input` must be a JSON object") for bad in ("{}", [1], 5)),
    *(
        (parts({"functionCall": {"name": "look", "args": bad}}, role="model"), "`args` must be a JSON object")
        for bad in ("{}", [1], 5)
    ),
    (said({"type": "tool_result", "content": 0}), "`content` must hold"),
    (said(HI, system=[IMAGE]), NO_IMAGE),
    (said({"type": "search_result", "content": [IMAGE]}), NO_IMAGE),
    (said({**IMAGE, "source": {"type": "base64"}}), "send its source as `base64` or `url`, with what it names"),
    (said({**IMAGE, "source": {"type": "url", "url": [1]}}), "`url` must be a JSON string"),
    (parts({"text": "Hi."}, systemInstruction={"parts": [PNG]}), "a part that is no text; send text"),
    *(
        (said({"type": kind, **more, field: ["Hi."]}, role=role), f"`{field}` must be a JSON string")
        for role, field, kind, more in (
            ("user", "text", "text", {}),
            ("assistant", "text", "text", {}),
            ("assistant", "content", "compaction", {}),
            ("assistant", "thinking", "thinking", {}),
            ("user", "title", "document", {"source": {"type": "text", "data": "It rains."}}),
            ("user", "title", "document", {"source": {"type": "content", "content": [IMAGE]}}),
            ("user", "source", "search_result", {"content": []}),
            ("user", "tool_name", "tool_reference", {}),
        )
    ),
    (said(HI, system=[{"type": "text", "text": {"a": 1}}]), "`text` must be a JSON string"),
    (items({"role": "user", "content": [{"type": "input_text", "text": 5}]}), "`text` must be a JSON string"),
    (
        items({"role": "tool", "tool_call_id": "c", "content": "ok"}),
        "a message of role 'tool' cannot be served; send one of user, system, developer or assistant",
    ),
    (
        items({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}),
        "send `tool_calls` as items of type function_call",
    ),
    (
        items({"role": "assistant", "content": [{"type": "input_image", "image_url": "https://somewhere/a.png"}]}),
        "an assistant's message with images cannot be served; send text",
    ),
    (
        items(
            SAID_USER,
            tools=[{"type": "function", "name": "look"}],
            tool_choice={"type": "function", "function": {"name": "look"}},
        ),
        "`tool_choice` must have the `name` of a tool",
    ),
]


@pytest.mark.parametrize(("asked", "refusal"), LOST)
def test_what_no_chat_message_holds_is_refused_by_name_and_not_lost(asked, refusal):
    """Without it the model would read a call without arguments, `None`, or nothing at all."""
    dialect, body = asked
    with pytest.raises(InvalidRequest, match=re.escape(refusal)):
        dialect.parse({"model": "m", "stream": False, **body})


def test_a_null_text_is_empty_and_not_the_word_none():
    call = messages_call({"role": "user", "content": [{"type": "text", "text": None}]})
    assert call.messages == [{"role": "user", "content": ""}]
    asked = {"role": "user", "content": [{"type": "input_text", "text": None}, {"type": "input_text", "text": "Hi."}]}
    call = Responses().parse({"input": [asked]})
    assert call.messages == [{"role": "user", "content": "\nHi."}]


def test_a_part_of_a_reply_without_a_type_is_text():
    parts = [{"text": "a"}, {"type": "refusal", "refusal": "b"}]
    items = [{"type": "reasoning", "summary": [{"text": "x"}]}, {"role": "assistant", "content": parts}]
    call = Responses().parse({"input": items})
    assert call.messages == [{"role": "assistant", "content": "ab", "reasoning": "x"}]


def test_a_document_is_read_with_its_title_and_context():
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "title": "Weather", "context": "of today", "source": source}
    call = messages_call({"role": "user", "content": [document]})
    assert call.messages == [{"role": "user", "content": "Weather\nof today\nIt rains."}]
    pages = {**document, "source": {"type": "content", "content": [IMAGE]}}
    (message,) = messages_call({"role": "user", "content": [pages]}).messages
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][0]["text"] == "Weather\nof today"


def test_one_allowed_tool_that_is_required_is_the_named_tool():
    """As `allowedFunctionNames` of Gemini; of several allowed tools only the mode counts."""
    tools = [{"type": "function", "name": name} for name in ("look", "write")]
    for named, choice in (
        (tools[:1], {"type": "function", "function": {"name": "look"}}),
        (tools, "required"),
        ([tools[0], {"type": "web_search"}], {"type": "function", "function": {"name": "look"}}),
        ([{"type": "web_search"}], None),
        ([{"type": "mcp", "server_label": "a"}], None),
    ):
        asked = {"input": "Hi.", "tools": tools} | {
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": named}
        }
        assert Responses().parse(asked).body.get("tool_choice") == choice


def test_the_earlier_name_of_an_output_format_constrains_the_reply_too():
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    asked = {"max_tokens": 9, "messages": [SAID_USER]}
    bodies = [{**asked, "output_format": wanted}, {**asked, "output_config": {"format": wanted}}]
    first, second = (Messages().parse(body).body for body in bodies)
    assert first == second
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_an_image_in_a_function_response_reaches_the_engine():
    image = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    response = {"name": "look", "response": {"output": "see"}, "parts": [image]}
    call = gemini_call(
        contents=[
            {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": response}]},
        ]
    )
    assert [message["role"] for message in call.messages] == ["assistant", "tool", "user"]
    (part,) = call.messages[-1]["content"]
    assert part["image_url"]["url"] == "data:image/png;base64,aGk="


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_each_effort_reaches_the_engine_by_its_own_name(effort):
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "output_config": {"effort": effort}}
    assert Messages().parse(asked).body["reasoning_effort"] == effort
    for level in (effort.upper(), "MINIMAL"):
        config = {"thinkingConfig": {"thinkingLevel": level}}
        call = gemini_call(contents=[{"parts": [{"text": "Hi."}]}], generationConfig=config)
        assert call.body["reasoning_effort"] == level.lower()


def type_names(declared: Any) -> list[str]:
    if (field := getattr(declared, "__annotations__", {}).get("type")) is not None:
        return re.findall(r"[\"'](\w+)[\"']", getattr(field, "__forward_arg__", repr(field)))
    found = [name for each in typing.get_args(declared) for name in type_names(each)]
    return sorted(set(found))


def parsed_or_refused(dialect: Any, body: dict[str, Any], kind: str) -> list[Any]:
    """Return the messages of a request, or of one that is refused, its refusal, which names the type."""
    try:
        return dialect.parse(body).messages
    except InvalidRequest as error:
        refusal = str(error)
    assert kind in refusal
    assert "; send " in refusal
    return [refusal]


BLOCK: dict[str, Any] = {
    "id": "i",
    "tool_use_id": "i",
    "name": "look",
    "input": {},
    "text": "said",
    "tool_name": "said",
}
BLOCK |= {"title": "said", "source": {"type": "text", "data": "said"}, "thinking": "said"}
SERVED_BLOCKS = {"text", "document", "search_result", "tool_result", "compaction", "tool_reference"}


@pytest.mark.parametrize("kind", [*type_names(BetaContentBlockParam), *type_names(Content)])
@pytest.mark.parametrize("role", ["assistant", "user", "result"])
def test_each_type_of_block_of_anthropic_s_sdk_is_served_or_refused_by_name(kind, role):
    """Blocks of Anthropic's own tools in an assistant's message are ignored: only its service reads them."""
    block = {"type": kind, **BLOCK, "content": [{"type": "text", "text": "said"}]}
    if kind == "search_result":
        block["source"] = "https://somewhere"
    if kind == "compaction":
        block["content"] = "said"
    content = [{"type": "tool_result", "tool_use_id": "i", "content": [block]}] if role == "result" else [block]
    asked = {"max_tokens": 9, "messages": [{"role": role.replace("result", "user"), "content": content}]}
    messages = parsed_or_refused(Messages(), asked, kind)
    if role == "assistant":
        dropped = Messages().parse(asked).dropped_items
        assert dropped == ([] if kind in ("text", "compaction", "thinking", "tool_use") else [kind])
    is_served = kind in SERVED_BLOCKS - {"tool_result"} or (kind == "tool_result" and role == "user")
    if is_served and (role != "assistant" or kind in ("text", "compaction")):
        assert "said" in messages[-1]["content"]


def test_a_document_that_is_no_text_is_refused_with_what_to_send():
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    with pytest.raises(
        InvalidRequest, match="a document with a source of type 'base64' cannot be served; send its text"
    ):
        messages_call({"role": "user", "content": [document]})


@pytest.mark.parametrize("is_result", [False, True])
def test_pages_of_a_document_reach_the_engine_as_images_between_its_texts(is_result):
    page = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    text = {"type": "text", "text": "said"}
    document = {"type": "document", "source": {"type": "content", "content": [text, page, text]}}
    result = {"type": "tool_result", "tool_use_id": "i", "content": [document]}
    messages = messages_call({"role": "user", "content": [result if is_result else document]}).messages
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    content = messages[-1]["content"]
    assert content == ([shown] if is_result else [text, shown, text])
    document["source"]["content"][1] = {"type": "video"}
    with pytest.raises(InvalidRequest, match="a block of type 'video' cannot be served; send text or images"):
        messages_call({"role": "user", "content": [document]})


@pytest.mark.parametrize("kind", type_names(ResponseInputItemParam))
def test_each_type_of_item_of_openai_s_sdk_is_served_with_its_output_or_refused_by_name(kind):
    """An ignored call has an ignored output, and a served call a served one."""
    item = {
        "type": kind,
        "call_id": "c",
        "id": "i",
        "name": "look",
        "role": "user",
        "content": "said",
        "output": "said",
    }
    if kind != "item_reference":
        messages = parsed_or_refused(Responses(), {"input": [item]}, kind)
        if not messages:
            assert Responses().parse({"input": [item]}).dropped_items == [kind]
        if kind.endswith("_call") and f"{kind}_output" in type_names(ResponseInputItemParam):
            answered = parsed_or_refused(Responses(), {"input": [item, {**item, "type": f"{kind}_output"}]}, kind)
            assert len(answered) in (0, 2)
            assert len(messages) == len(answered) / 2


@pytest.mark.parametrize("kind", type_names(ResponseInputContentParam))
def test_each_type_of_part_of_openai_s_sdk_is_served_or_refused_by_name(kind):
    part = {"type": kind, "text": "said", "image_url": "https://somewhere/a.png", "file_id": "f"}
    parsed_or_refused(Responses(), {"input": [{"role": "user", "content": [part]}]}, kind)


PARTS: dict[str, Any] = {
    "text": "said",
    "functionCall": {"name": "look", "args": {"said": 1}},
    "functionResponse": {"name": "look", "response": {"output": "said"}},
    "inlineData": {"mimeType": "image/png", "data": "said"},
    "fileData": {"mimeType": "image/png", "fileUri": "said"},
}
SERVED_PARTS = {"model": {"text", "functionCall"}, "user": PARTS.keys() - {"functionCall"}}
OF_A_THOUGHT = {"thought": True, "thoughtSignature": "c2lnbmF0dXJl"}
"""What a part of a reply may hold alone: it is ignored and counted."""


@pytest.mark.parametrize("field", sorted(str(field.alias or name) for name, field in Part.model_fields.items()))
@pytest.mark.parametrize("role", ["model", "user"])
def test_each_field_of_a_part_of_google_s_sdk_is_served_ignored_with_a_count_or_refused_by_name(field, role):
    value = (PARTS | OF_A_THOUGHT).get(field, {"said": 1})
    contents = [{"role": role, "parts": [{field: value}]}]
    if field in OF_A_THOUGHT and role == "model":
        assert gemini_call(contents=contents).dropped_items == ["thoughtSignature"]
    elif field in SERVED_PARTS[role]:
        call = gemini_call(contents=contents)
        assert "said" in str(call.messages)
        assert call.dropped_items == []
    else:
        named = "nothing" if field in (*OF_A_THOUGHT, "videoMetadata") else field
        with pytest.raises(InvalidRequest, match=rf"a part with {named}.*; send text"):
            gemini_call(contents=contents)


@pytest.mark.parametrize("field", sorted(str(field.alias or name) for name, field in Tool.model_fields.items()))
def test_each_kind_of_tool_of_google_s_sdk_is_served_or_dropped_by_name(field):
    declared = [{"name": "look", "parameters": {"type": "OBJECT"}}] if field == "functionDeclarations" else {}
    call = gemini_call(contents=[{"parts": [{"text": "Hi."}]}], tools=[{field: declared}])
    assert call.dropped_tools == ([] if field == "functionDeclarations" else [field])
    assert bool(call.tools) == (field == "functionDeclarations")


BILLED = "x-anthropic-billing-header: cc_version=2.1.222; cch={};"


def with_system(text: str) -> list[Call]:
    """Return the calls of all formats whose system text is this one; of those with parts, also in two of them."""
    user = {"role": "user", "content": "Hi."}
    parts = [{"type": "text", "text": piece} for piece in text.split("\n")]
    chat = [{"role": role, "content": content} for role in ("system", "developer") for content in (text, parts)]
    return [
        *(ChatCompletions().parse({"messages": [each, user]}) for each in chat),
        *(Messages().parse({"max_tokens": 9, "messages": [user], "system": system}) for system in (text, parts)),
        Responses().parse({"input": "Hi.", "instructions": text}),
        Responses().parse({"input": [{"role": "developer", "content": text}, user]}),
        gemini_call(contents={"role": "user", "parts": {"text": "Hi."}}, systemInstruction={"parts": [{"text": text}]}),
    ]


def system_text(call: Call) -> str:
    return "\n".join(
        piece
        for message in call.messages
        if message["role"] != "user"
        for piece in (
            [message["content"]] if isinstance(message["content"], str) else [p["text"] for p in message["content"]]
        )
    ).strip()


@pytest.mark.parametrize(
    "place", ["{line}\nBe brief.\nBe kind.", "Be brief.\n  {line}\nBe kind.", "Be brief.\nBe kind.\n{line}"]
)
def test_the_line_that_only_anthropic_s_service_reads_goes_alone_wherever_it_stands(place):
    """It differs with every call, so the next call would not extend the chain; what stands beside it must stay."""
    first, second = (with_system(place.format(line=BILLED.format(number))) for number in ("00001", "00002"))
    for call, later in zip(first, second, strict=True):
        assert system_text(call) == "Be brief.\nBe kind."
        assert call.messages == later.messages == call.body["messages"]


def test_a_system_message_of_nothing_else_goes_whole_and_what_a_user_quotes_stays():
    assert [system_text(call) for call in with_system(BILLED)] == [""] * 9
    quoted = {"role": "user", "content": f"What is\n{BILLED}?"}
    assert messages_call(quoted).messages == ChatCompletions().parse({"messages": [quoted]}).messages == [quoted]


def schema_of(parameters: dict[str, Any], field: str = "parameters") -> dict[str, Any]:
    """Return a schema of Google's as the engine gets it, of a function and of the reply alike."""
    declared = {"functionDeclarations": [{"name": "look", field: parameters}]}
    found: dict[str, Any] = gemini_call(contents=CONTENTS, tools=[declared]).body["tools"][0]["function"]["parameters"]
    if field == "parameters":
        config = {"responseMimeType": "application/json", "responseSchema": parameters}
        asked = gemini_call(contents=CONTENTS, generationConfig=config).body["response_format"]
        assert asked["json_schema"]["schema"] == found
    return found


CONTENTS = [{"parts": [{"text": "Hi."}]}]
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "STRING", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
        (
            {"anyOf": [{"type": "INTEGER"}, {"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "integer"}, {"type": "string"}, NULL]},
        ),
        (
            {"any_of": [{"type": "INTEGER"}, {"type": "NULL"}], "nullable": True},
            {"anyOf": [{"type": "integer"}, NULL]},
        ),
        ({"type": "NULL", "nullable": True}, NULL),
        ({"type": "STRING", "nullable": False}, {"type": "string"}),
        ({"type": "TYPE_UNSPECIFIED", "description": "any"}, {"description": "any"}),
        ({"type": "ARRAY", "min_items": "2", "items": {"type": "STRING"}}, {"type": "array", "minItems": 2}),
    ],
)
def test_null_is_valid_wherever_google_s_schema_allows_it(given, expected):
    """As google-genai writes `Optional[Literal[…]]` and `Optional[int | str]`; fields of either spelling."""
    found = schema_of({"type": "OBJECT", "properties": {"x": given}, "required": ["x"]})
    found["properties"]["x"].pop("items", None)
    assert found == {"type": "object", "properties": {"x": expected}, "required": ["x"]}


@pytest.mark.parametrize("field", ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
@pytest.mark.parametrize("name", ["example", "nullable", "type", "format", "any_of"])
def test_what_an_author_names_in_a_schema_is_no_field_of_it(field, name):
    schema = {"type": "object", field: {name: {"type": "string"}}}
    assert schema_of(schema, "parametersJsonSchema") == schema
    assert schema_of({"type": "object", "dependentRequired": {name: ["a"]}}, "parametersJsonSchema") == {
        "type": "object",
        "dependentRequired": {name: ["a"]},
    }


def test_a_reference_that_may_be_null_keeps_what_it_names():
    schema = {"$ref": "#/$defs/a", "nullable": True}
    assert schema_of({"properties": {"x": schema}})["properties"]["x"] == {"anyOf": [{"$ref": "#/$defs/a"}, NULL]}


def test_a_choice_of_texts_that_may_be_null_is_of_its_texts():
    config = {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a"], "nullable": True}}
    assert gemini_call(contents=CONTENTS, generationConfig=config).body["structured_outputs"] == {"choice": ["a"]}
