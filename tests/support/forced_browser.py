"""A logits processor for vLLM that plays as a model would that reads a page: it acts on the marked elements."""

import json
import re
from collections.abc import Sequence

from support.forced_tokens import END_OF_TURN, ForcedTokens

SOLVED = "All steps are done"
TYPED = "swordfish"


class ForcedBrowser(ForcedTokens):
    """Types into the element with the label `field`, clicks the one with the label `target`, and ends when told to."""

    def reply_ids(self, prompt_ids: Sequence[int], *, only_calls: bool) -> list[int]:
        page = self._tokenizer.decode(prompt_ids).rpartition("<browser_state>")[2]
        text = json.dumps({"memory": "I look at the page.", "action": actions(page)})
        return list(self._tokenizer.encode(text + END_OF_TURN, add_special_tokens=False))


def actions(page: str) -> list[dict[str, object]]:
    if SOLVED in page:
        return [{"done": {"text": "It is done.", "success": True, "files_to_display": []}}]
    found = {label: int(index) for index, label in re.findall(r"\[(\d+)\]<[^>]*aria-label=(field|target)\b", page)}
    typed = [{"input": {"index": found["field"], "text": TYPED, "clear": True}}] if "field" in found else []
    clicked = [{"click": {"index": found["target"]}}] if "target" in found else [{"wait": {"seconds": 1}}]
    return [*typed, *clicked]
