"""Show three pictures and ask for their names, through any OpenAI-compatible server whose model sees."""

from openai import AsyncOpenAI

QUESTION = "name them"


def conversation(pictures: list) -> list[dict]:
    messages = []
    for url in pictures:
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
        messages.append({"role": "assistant", "content": "ok"})
    return [*messages, {"role": "user", "content": QUESTION}]


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    completion = await client.chat.completions.create(
        model=model, messages=conversation(task["pictures"]), max_completion_tokens=8
    )
    return completion.choices[0].message.content or ""
