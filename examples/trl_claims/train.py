"""Train with TRL's own GRPO loss from sessions that a proxy captured: it claims them over HTTP, from any machine.

    python train.py MODEL_DIRECTORY SHARED_DIRECTORY [--url http://127.0.0.1:8100] [--key KEY] [--updates 10]

Serve with `turnwise proxy`. Each update publishes its weights, and then acknowledges its groups: each is trained once.
"""

import argparse
import time
from pathlib import Path
from statistics import mean

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from turnwise.client import Client

NAME, ROWS = "trl", 8


def trl_trainer(model: str, out: str) -> GRPOTrainer:
    on_cpu = not torch.cuda.is_available()
    args = GRPOConfig(out, loss_type="dapo", epsilon_high=0.28, use_cpu=on_cpu, bf16=not on_cpu, report_to="none")
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    unused = Dataset.from_dict({"prompt": [""] * ROWS})
    trainer = GRPOTrainer(policy, len, args=args, train_dataset=unused, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(chains: list[dict], num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return what TRL's loss reads: prompts padded on the left, and what follows with its mask of sampled tokens."""

    def pad(rows: list[list], side: str = "right", kind: torch.dtype = torch.long) -> torch.Tensor:
        return pad_sequence([torch.tensor(row, dtype=kind) for row in rows], True, 0, side).to(device)

    prompts = [chain["tokens"][: chain["prompt_length"]] for chain in chains]
    replies = [chain["tokens"][chain["prompt_length"] :] for chain in chains]
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([[1] * len(prompt) for prompt in prompts], "left"),
        "completion_ids": pad(replies),
        "completion_mask": pad([[1] * len(reply) for reply in replies]),
        "tool_mask": pad([chain["loss_mask"] for chain in chains]),
        "old_per_token_logps": pad([chain["logprobs"] for chain in chains], kind=torch.float32),
        "advantages": torch.tensor([chain["advantage"][0] for chain in chains], device=device),
        "num_items_in_batch": torch.tensor(float(num_tokens), device=device),
    }


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out")
parser.add_argument("--url", default="http://127.0.0.1:8100")
parser.add_argument("--key", help="of the role trainer or admin, where the proxy asks for one")
parser.add_argument("--updates", default=10, type=int)
parser.add_argument("--rate", default=1e-6, type=float)
given = parser.parse_args()
trainer, proxy = trl_trainer(given.model, given.out), Client(given.url, given.key)
optimizer = torch.optim.AdamW(trainer.model.parameters(), given.rate)
for number in range(1, given.updates + 1):
    while not (held := proxy.claim(NAME, lease_seconds=600))["groups"]:
        time.sleep(1)
    chains, trained = held["chains"], {}
    baseline = mean(chain["session_reward"] for chain in chains)
    for chain in chains:  # a session without a group is compared with the batch
        chain["advantage"] = chain["advantage"] or [chain["session_reward"] - baseline] * len(chain["turn_ids"])
        trained |= dict(zip(chain["turn_ids"], chain["advantage"], strict=True))
    num_tokens = sum(sum(chain["loss_mask"]) for chain in chains)
    for start in range(0, len(chains), ROWS):
        rows = inputs_of(chains[start : start + ROWS], num_tokens, trainer.model.device)
        trainer._compute_loss(trainer.model, rows).backward()  # noqa: SLF001  TRL's loss, without its loop
    optimizer.step()
    optimizer.zero_grad()
    trainer.model.save_pretrained(path := Path(given.out).absolute() / f"v{number:06d}")
    version = proxy.publish_policy(str(path))["version"]
    print(proxy.acknowledge_claim(held, NAME, version, trained), flush=True)
