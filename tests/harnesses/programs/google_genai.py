"""A chat on Google's SDK, streamed, which calls the tool itself."""

from google import genai
from google.genai import types
from shell import MODEL, PROMPT, bash

client = genai.Client()
retries = types.HttpOptions(retry_options=types.HttpRetryOptions())
chat = client.chats.create(model=MODEL, config=types.GenerateContentConfig(tools=[bash], http_options=retries))
print("".join(chunk.text or "" for chunk in chat.send_message_stream(PROMPT)))
