"""Write GSM8K's lines as tasks: `python tasks.py train.jsonl test.jsonl > tasks.jsonl`; the second file is held out."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def tasks_of(lines: Iterable[str], split: str) -> Iterator[dict]:
    for number, line in enumerate(lines):
        found = json.loads(line)
        answer = found["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {"task_id": f"{split}-{number}", "split": split, "question": found["question"], "answer": answer}


if __name__ == "__main__":
    for path, split in zip(sys.argv[1:], ("train", "eval"), strict=False):
        with Path(path).open(encoding="utf-8") as lines:
            for task in tasks_of(lines, split):
                print(json.dumps(task))
