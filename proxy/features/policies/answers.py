"""Models of the answers of policies' routes; only the OpenAPI document imports them."""

from __future__ import annotations

from pydantic import Field

from proxy.routes.models import answer_model, columns, create, field, model_of, page_model
from turnwise.features import policies
from turnwise.features.earned import Earned
from turnwise.features.untrained import TrainedShare
from turnwise.types import Policy, PolicyVersion

PolicyAnswer = answer_model(
    "PolicyAnswer",
    PolicyVersion,
    "A version of a policy.",
    policy=field(str, "The name of its policy."),
    path=field(
        str | None,
        "The directory of its files, or the name of a public model; null for a version of the default policy where the "
        "caller's tenant may not publish a directory.",
    ),
    on_disk=field(
        bool | None,
        "Whether its files exist, as far as the proxy sees; null for the name of a public model, "
        "and where the file system does not answer.",
    ),
)
ListedVersion = create(
    "ListedVersion",
    PolicyAnswer,
    "A version of a policy in a list.",
    {
        "earned": (
            model_of(Earned) | None,
            Field(default=None, description="What the tenant's newest finished sessions earned, with `earned=true`."),
        )
    },
)
NamedPolicy = answer_model("NamedPolicy", Policy, "A policy: the default one, or one that a tenant created.")
ListedPolicy = answer_model(
    "ListedPolicy",
    Policy,
    "A policy in a list.",
    summary=(
        answer_model("PolicySummary", policies.PolicySummary, **columns("policy")) | None,
        Field(default=None, description="What it holds, with `summary=true`."),
    ),
)
PolicyPage = page_model(
    "PolicyPage",
    ListedVersion,
    "Some policy versions.",
    pinned_version=field(int | None, "The version that a person pinned the policy to; null follows the newest."),
    key_policy=field(str, "The policy that new sessions of the caller's key sample with."),
    policies=field(
        list[ListedPolicy],  # type: ignore[valid-type]
        "The default policy and the tenant's own ones.",
    ),
    trained_shares=field(
        list[TrainedShare], "With `summary=true`, what was trained of the newest 200 sessions; else empty."
    ),
)
