"""`turnwise verify --forward` and `certify`: a forward pass of the files, and which old part an engine still has.

`transformers` computes them, with none of the code that trains or serves but the processors of logits. So an engine
that samples with other weights than it was given is seen, which a comparison of the engine with itself cannot show.
Where an engine does not compute a version, the part of the model that it did not load is named: the proxy keeps what
the engine answered to the version's probe, and each part in turn gets the weights that the engine had before, until a
forward pass gives that answer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import cachetools
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.features import Settings
from trainer.features.supports.processors import SampledTurn, TurnProcessors, apply_to_turn
from trainer.features.supports.turns import Vocabulary, processors
from trainer.model.loading import is_capped, model_class, read_config
from trainer.model.model import Policy
from turnwise.features.supports import unpack
from turnwise.features.verify.records import Verification
from turnwise.image_urls import image_digests
from turnwise.sampling import SUPPORT, temperature_of
from turnwise.store.turns import TurnView
from turnwise.types import PolicyKind, PolicyVersion
from turnwise.version_directory import ENGINE_ANSWER, MANIFEST, Probe, read_json, read_manifest, read_probe

Reals: TypeAlias = npt.NDArray[np.float64]

MODELS_KEPT = 2
"""Versions in memory: sessions that were played at the same time have neighbouring ones."""
ALL = "all of the model"
EXPLAINED = 0.1
"""A part explains an answer if its old weights leave at most this share of the difference."""
CHANGE = 0.1
"""Size of random changes, as a share of a weight's own size; of what is zero, the size itself."""
_OF_MODULE = re.compile(r"\.(weight|bias|lora_.*)$")
_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")


class ForwardChecker:
    """Recomputes the logprobs of turns from the files of the version that sampled them.

    `tolerance` is the largest difference of logprobs, in nats, that is no mismatch.
    """

    def __init__(self, versions: Mapping[int, PolicyVersion], *, tolerance: float) -> None:
        self._versions = versions
        self._tolerance = tolerance
        self._models: cachetools.LRUCache[tuple[int, str], Any] = cachetools.LRUCache(MODELS_KEPT)
        self._vocabularies: cachetools.LRUCache[str, Vocabulary] = cachetools.LRUCache(MODELS_KEPT)

    def close(self) -> None:
        self._models.clear()
        self._vocabularies.clear()

    def check(self, view: TurnView, place: str, report: Verification) -> None:
        found = self.logprobs(view)
        if isinstance(found, str):
            report.not_checked[found] += 1
            return
        now, is_known = found
        for index in np.flatnonzero(is_known):
            where, stored = f"{place} logprobs[{index}]", float(view.turn.logprobs[index])
            report.compare_logprobs(stored, float(now[index]), self._tolerance, where, "the files give")
        report.checked["turns with logprobs recomputed"] += 1

    def logprobs(
        self, view: TurnView, version: int | None = None, dtype: str = "float32"
    ) -> tuple[Reals, npt.NDArray[np.bool_]] | str:
        """Return the logprob of each sampled token [R] and of which the mask is known [R], or why there is none.

        `version` is another one than sampled it, `dtype` the number format.
        """
        turn = view.turn
        found = self._processors(view)
        if isinstance(found, str):
            return found
        tokens = torch.tensor([*view.prompt_token_ids.tolist(), *turn.token_ids.tolist()])
        with torch.inference_mode():
            output = self._model(turn.policy_version_first if version is None else version, dtype)(tokens[None])
            logits_RV = output.logits[0, turn.prompt_length - 1 : -1].float()
            if found is not None:
                sampled = SampledTurn(processors=found, prompt=view.prompt_token_ids, sampled=turn.token_ids)
                apply_to_turn(logits_RV, sampled)
            log_p_RV = torch.log_softmax(logits_RV / (temperature_of(turn.sampling) or 1.0), -1)
        now: Reals = log_p_RV.gather(1, tokens[turn.prompt_length :, None])[:, 0].numpy().astype(np.float64)
        is_known = None if found is None else found.is_known
        return now, np.ones(len(now), np.bool_) if is_known is None else is_known

    def of_text(self, tokens: Sequence[int], positions: Sequence[int], dtype: str = "float32") -> Reals:
        """Return the logprobs of the tokens at some positions of a text, under version 0."""
        with torch.inference_mode():
            log_p_TV = self._model(0, dtype)(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return np.array([float(log_p_TV[position - 1, tokens[position]]) for position in positions])

    def _processors(self, view: TurnView) -> TurnProcessors | str | None:
        """Return what the engine applied to the turn's logits beside a scale, or why it cannot be applied again."""
        turn = view.turn
        if image_digests(view.messages):
            return "with images, whose logprobs the trainer checks"
        if turn.policy_version_first != turn.policy_version_last:
            return "sampled under two versions"
        version = self._versions.get(turn.policy_version_first)
        if version is None or not Path(version.path).is_dir():
            return f"the files of version {turn.policy_version_first} are not on this machine"
        base = _base_of(version)
        vocabulary = self._vocabularies.setdefault(base, Vocabulary(base))
        support = unpack(turn.parts[SUPPORT]) if SUPPORT in turn.parts else None
        found = processors(turn.sampling, view.prompt_token_ids, turn.token_ids, support, vocabulary)
        return f"sampled with {found}, which cannot be applied again" if isinstance(found, str) else found

    def _model(self, version: int, dtype: str) -> Any:
        if (version, dtype) not in self._models:
            self._models[version, dtype] = load_version(self._versions[version], dtype)
        return self._models[version, dtype]


def change_at_random(
    model: str, kind: PolicyKind, directory: Path, tokens: list[int], positions: Sequence[int], dtype: str
) -> tuple[list[float], list[float]]:
    """Write a version whose weights are random changes of a model's.

    Returns:
        The logprobs of some tokens of a text under it in float32; and in `dtype`, empty where that is the same.
    """
    policy = Policy(Settings(model=model, kind=kind, device="cpu"))
    policy.load(0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or kind is PolicyKind.FULL):
                size = CHANGE * float(parameter.float().square().mean().sqrt())
                parameter.add_(torch.randn_like(parameter) * (size or CHANGE))
    policy.save(directory, policy.trained_state())

    def logprobs() -> list[float]:
        log_p_TV = policy.next_logprobs(tokens)
        return [float(log_p_TV[position - 1, tokens[position]]) for position in positions]

    exact = logprobs()
    if dtype == "float32":
        return exact, []
    policy.model.to(getattr(torch, dtype))
    return exact, logprobs()


def load_version(version: PolicyVersion, dtype: str = "float32") -> Any:
    base = _base_of(version)
    config = read_config(base)
    given = {
        "config": config,
        "dtype": getattr(torch, dtype),
        "attn_implementation": "eager" if is_capped(config) else None,
    }
    model = model_class(config).from_pretrained(base, **given).eval()
    if _is_adapter(version):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, version.path).eval()
    return model


def _is_adapter(version: PolicyVersion) -> bool:
    return version.kind is PolicyKind.LORA and version.version > 0


def _base_of(version: PolicyVersion) -> str:
    """Return the directory of the whole model that a version is, or is an adapter of."""
    return str(read_json(Path(version.path, MANIFEST))["base_model"]) if _is_adapter(version) else version.path


def name_stale_parts(versions: Mapping[int, PolicyVersion], report: Verification) -> None:
    for version, policy in sorted(versions.items()):
        answer = policy.metrics.get(ENGINE_ANSWER)
        probe = read_probe(Path(policy.path)) if answer else None
        if answer is None or probe is None:
            continue
        parent = int(read_manifest(Path(policy.path)).get("parent", 0))
        known = [versions[one] for one in dict.fromkeys((parent, 0)) if one in versions]
        found = None
        for older in (one for one in known if Path(one.path).is_dir()):
            found = found or stale_part(policy, older, probe, answer["positions"], answer["logprobs"])
        report.add(
            "weights", f"version {version}", found or "the engine's answer is that of no part with older weights"
        )


def stale_part(
    policy: PolicyVersion, older: PolicyVersion, probe: Probe, positions: list[int], logprobs: list[float]
) -> str | None:
    """Return which part the engine has of an older version; None if no single part explains its answer."""
    model, old = (_untied(load_version(one)) for one in (policy, older))
    loaded = {name for name in model.state_dict() if policy.kind is PolicyKind.FULL or ".lora_" in name}
    new = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in loaded}
    answer = torch.tensor(logprobs)
    older_state = old.state_dict()
    gap, gaps = _gap(model, probe, positions, answer), list[tuple[float, str]]()
    for part, names in _parts(new):
        # An adapter had none of the tensors before.
        before = {name: older_state.get(name, torch.zeros_like(new[name])) for name in names}
        model.load_state_dict(before, strict=False)
        gaps.append((_gap(model, probe, positions, answer), part))
        model.load_state_dict({name: new[name] for name in names}, strict=False)
    nearest, part = min(gaps, key=lambda found: found[0])
    if nearest > EXPLAINED * gap:
        return None
    return (
        f"the engine has {part} of version {older.version}: with it the files give the engine's logprobs within "
        f"{nearest:.2g} nats, with version {policy.version}'s own within {gap:.2g}"
    )


def _untied(model: Any) -> Any:
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def _parts(names: Mapping[str, Tensor]) -> Iterator[tuple[str, list[str]]]:
    yield ALL, list(names)
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        layer = _LAYER.search(name)
        parts[f"{layer[2]} of layer {layer[1]}" if layer else _OF_MODULE.sub("", name).rsplit(".")[-1]].append(name)
        if layer:
            parts[f"{layer[2]} of all layers"].append(name)
    yield from parts.items()


def _gap(model: Any, probe: Probe, positions: list[int], answer: Tensor) -> float:
    tokens = torch.tensor([probe.token_ids])
    with torch.inference_mode():
        log_p_TV = model(tokens).logits[0].float().log_softmax(-1)
    at = torch.tensor(positions)
    return float((log_p_TV[at - 1].gather(1, tokens[0, at, None])[:, 0] - answer).abs().mean())
