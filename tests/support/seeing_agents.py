"""Agents with images in four wire formats: sessions of several turns with branches, repetitions and cut-off streams."""

import dataclasses
import inspect
import io
import random
from typing import Any

import httpx2
import torch
import transformers
from PIL import Image
from support.proxies import RunningProxy
from support.served_vision import data_url, picture

from turnwise.chains import ChainTokens
from turnwise.features.images import IMAGES
from turnwise.types import Json

SIZES = (32, 64, 100, 140)
TEXTS = ("look", "and now?", "what is it?", "go on")
FORMATS = ("chat", "responses", "messages", "gemini")


@dataclasses.dataclass
class SeeingAgent:
    """One session: what its client would send, in its format."""

    proxy: RunningProxy
    session_id: str
    format: str
    rng: random.Random
    said: list[Json] = dataclasses.field(default_factory=list)
    points: list[int] = dataclasses.field(default_factory=list)
    """Lengths of `said` before each question, from which a branch may start."""
    last: tuple[list[Json], str] = dataclasses.field(default_factory=lambda: ([], ""))
    """What was said up to a reply of the Responses API, and its id, which the next call may name instead."""

    def play(self, num_turns: int, http: httpx2.Client) -> None:
        for turn in range(num_turns):
            if turn > 1 and self.rng.random() < 0.15:
                del self.said[self.rng.choice(self.points[1:]) :]
            self.points = [point for point in self.points if point < len(self.said)] + [len(self.said)]
            self.add(turn)
            for _ in range(2 if self.rng.random() < 0.1 else 1):
                reply = self.ask(http)
            self.said += reply

    def add(self, turn: int) -> None:
        count = self.rng.choice((0, 1, 1, 2))
        sizes = [(self.rng.choice(SIZES), self.rng.choice(SIZES)) for _ in range(count)]
        images = [picture(self.rng.randrange(10**6), size) for size in sizes]
        is_tool = turn > 0 and self.rng.random() < 0.3
        self.said += getattr(self, f"_{self.format}")(self.rng.choice(TEXTS), images, is_tool=is_tool)

    def ask(self, http: httpx2.Client) -> list[Json]:
        """Return what the client adds to the conversation for the reply."""
        base, seed = f"{self.proxy.url}/sessions/{self.session_id}", self.rng.randrange(10**6)
        match self.format:
            case "chat":
                return self._ask_chat(f"{base}/v1/chat/completions", http, seed)
            case "responses":
                body = {"model": "small", "input": self.said, "max_output_tokens": 16, "seed": seed}
                answered, last_id = self.last
                if last_id and answered == self.said[: len(answered)] and self.rng.random() < 0.5:
                    body |= {"input": self.said[len(answered) :], "previous_response_id": last_id}
                if self.rng.random() < 0.3:
                    text = self._stream(f"{base}/v1/responses", body | {"stream": True}, http)
                    return [{"role": "assistant", "content": text}]
                reply = http.post(f"{base}/v1/responses", json=body).raise_for_status().json()
                self.last = [*self.said, *reply["output"]], reply["id"]
                return list(reply["output"])
            case "messages":
                body = {"model": "small", "messages": self.said, "max_tokens": 16, "seed": seed}
                if self.rng.random() < 0.3:
                    text = self._stream(f"{base}/v1/messages", body | {"stream": True}, http)
                    return [{"role": "assistant", "content": text}]
                reply = http.post(f"{base}/v1/messages", json=body).raise_for_status().json()
                return [{"role": "assistant", "content": reply["content"]}]
        body = {"contents": self.said, "generationConfig": {"maxOutputTokens": 16, "seed": seed}}
        if self.rng.random() < 0.3:
            text = self._stream(f"{base}/v1beta/models/small:streamGenerateContent?alt=sse", body, http)
            return [{"role": "model", "parts": [{"text": text}]}]
        reply = http.post(f"{base}/v1beta/models/small:generateContent", json=body).raise_for_status().json()
        return [reply["candidates"][0]["content"]]

    def _stream(self, url: str, body: Json, http: httpx2.Client) -> str:
        """Read a stream to its end; return the text that was sampled."""
        with http.stream("POST", url, json=body) as stream:
            stream.raise_for_status()
            list(stream.iter_lines())
        return str(self.proxy.turns(self.session_id)[-1].turn.response["content"] or "")

    def _ask_chat(self, url: str, http: httpx2.Client, seed: int) -> list[Json]:
        body: Json = {"model": "small", "messages": self.said, "max_tokens": 16, "seed": seed}
        mode = self.rng.random()
        if mode < 0.2:  # the client leaves after the first token, and asks again
            with http.stream("POST", url, json=body | {"stream": True, "max_tokens": 400}) as stream:
                next(line for line in stream.iter_lines() if '"content"' in line)
        if mode < 0.4:
            return [{"role": "assistant", "content": self._stream(url, body | {"stream": True}, http)}]
        reply = http.post(url, json=body | ({"n": 2} if mode < 0.6 else {})).raise_for_status().json()
        message = reply["choices"][-1]["message"]
        return [{"role": "assistant", "content": message["content"]}]

    def _chat(self, text: str, images: list[bytes], *, is_tool: bool) -> list[Json]:
        shown = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        content = [*shown, {"type": "text", "text": text}]
        role = {"role": "tool", "tool_call_id": "call_0"} if is_tool else {"role": "user"}
        return [role | {"content": content}]

    def _responses(self, text: str, images: list[bytes], *, is_tool: bool) -> list[Json]:
        shown = [{"type": "input_image", "image_url": data_url(image)} for image in images]
        content = [{"type": "input_text", "text": text}, *shown]
        if is_tool:
            return [{"type": "function_call_output", "call_id": "call_0", "output": content}]
        return [{"role": "user", "content": content}]

    def _messages(self, text: str, images: list[bytes], *, is_tool: bool) -> list[Json]:
        source = [{"type": "base64", "media_type": "image/png", "data": data_url(each)[22:]} for each in images]
        content = [{"type": "text", "text": text}, *({"type": "image", "source": each} for each in source)]
        if is_tool:
            content = [{"type": "tool_result", "tool_use_id": "call_0", "content": content}]
        return [{"role": "user", "content": content}]

    def _gemini(self, text: str, images: list[bytes], *, is_tool: bool) -> list[Json]:
        shown = [{"inlineData": {"mimeType": "image/png", "data": data_url(each)[22:]}} for each in images]
        if is_tool:
            response = {"name": "look", "response": {"output": text}, "parts": shown}
            return [{"role": "user", "parts": [{"functionResponse": response}]}]
        return [{"role": "user", "parts": [{"text": text}, *shown]}]


class Reference:
    """transformers' own forward pass, which places images by the placeholder's id."""

    def __init__(self, directory: Any) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self._processor = transformers.AutoImageProcessor.from_pretrained(directory)
        self._image_id = self._model.config.image_token_id

    @torch.no_grad()
    def gap(self, chain: ChainTokens, files: dict[str, bytes]) -> float | None:
        """Return the largest difference of a chain's stored logprobs; None where a reply has a placeholder."""
        ids = torch.from_numpy(chain.tokens.astype("int64"))[None]
        is_image = ids == self._image_id
        inside = torch.zeros_like(is_image)
        for image in chain.parts.get(IMAGES, ()):
            for offset, length in image.runs:
                inside[0, offset : offset + length] = True
        if (is_image & ~inside).any():
            return None
        images = [Image.open(io.BytesIO(files[image.digest])).convert("RGB") for image in chain.parts.get(IMAGES, ())]
        made = self._processor([images], return_tensors="pt") if images else {}
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            made["mm_token_type_ids"] = is_image.int()
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **made).logits[0, :-1].float()
        found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(chain.loss_mask[1:])
        return float((found - torch.from_numpy(chain.logprobs[1:]))[mask].abs().max())
