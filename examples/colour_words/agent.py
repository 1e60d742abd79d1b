"""Show three pictures and ask for their names, through any OpenAI-compatible server whose model sees."""

from openai import AsyncOpenAI

QUESTION = "name them"


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in task["pictures"]]
    messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": QUESTION}]}]
    completion = await client.chat.completions.create(model=model, messages=messages, max_completion_tokens=8)
    return completion.choices[0].message.content or ""
