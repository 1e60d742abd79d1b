"""A process in which a proxy without any feature plays calls of one session: `python core_alone.py STORE ENGINE CALLS`.

It prints how it refuses what needs a feature, and the modules of features that it has imported, which should be none.
"""

import json
import sys

from support.in_process import served
from support.waiting import wait_until

from proxy.settings import ProxySettings

PACKAGES = ("proxy.features", "turnwise.features", "trainer.features")


def play(store: str, engine: str, num_calls: int) -> list[str]:
    """Return the words by which it refuses what needs a feature, and a field that there is not."""
    with served(ProxySettings(engine=[engine], database=store)) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200, "the proxy is ready")
        for number in range(num_calls):
            messages = [{"role": "user", "content": "Hello."}]
            for turn in http.get("/v1/sessions/s/turns").json().get("data", []):
                messages += [turn["response"], {"role": "user", "content": "Go on."}]
            body = {"model": "fake", "messages": messages, "stream": number % 2 == 1, "max_tokens": 20}
            http.post("/sessions/s/v1/chat/completions", json=body).raise_for_status()
        unnamed = [http.post("/v1/chat/completions", json=body).headers["x-session-id"] for _ in range(2)]
        assert len({"s", *unnamed}) == 3, "a call that names no session has one of its own"
        shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        image = {"model": "fake", "messages": [{"role": "user", "content": shown}]}
        refused = [http.post("/v1/chat/completions", json=image)]
        fields = {"sampling": {"top_p": 0.5}}, {"record": False}, {"colour": "red"}
        refused += [http.post("/v1/sessions", json={"session_id": "t", **field}) for field in fields]
        return [each.json()["error"]["message"] for each in refused]


if __name__ == "__main__":
    refused = play(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps([refused, [name for name in sys.modules if name.startswith(PACKAGES)]]))
