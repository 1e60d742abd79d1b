"""Call Trinity's explorer in serve mode with Trinity's own client, and print the results as JSON.

The client is loaded from its file, because the package around it imports Ray.
"""

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

place = Path(sysconfig.get_path("purelib")) / "trinity" / "explorer" / "proxy" / "client.py"
spec = importlib.util.spec_from_file_location("trinity_client_module", place)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

client = module.TrinityClient(sys.argv[1])
client.task_id = "adds"
openai = client.get_openai_client()
messages = [{"role": "user", "content": "What is 2 + 2?"}]
ids = []
for question in ("Sure?", None):
    reply = openai.chat.completions.create(model="fake", messages=messages)
    ids.append(reply.id)
    messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
    messages += [{"role": "user", "content": question}]
found = {
    "alive": client.alive(),
    "first": client.feedback(0.25, ids[:1]),
    "second": client.feedback(1.0, ids[1:]),
    "waiting": client.get_metrics()["num_sessions_to_commit"],
    "commit": client.commit(),
    "metrics": client.get_metrics(),
    "wrong": client.feedback(1.0, []),
    "ids": ids,
}
print(json.dumps(found))
