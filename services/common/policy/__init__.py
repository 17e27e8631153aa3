"""The policy: rules as data, for what goes in, for passages and uploads, and for answers while they
are written (docs/policy.md, decision 0039)."""

from services.common.policy.check import Subject, Verdict
from services.common.policy.policy import NO_POLICY, Policy, PolicyFile, read_policy
from services.common.policy.rules import Rules, load_rules
from services.common.policy.schema import RuleSpec

__all__ = [
    "NO_POLICY",
    "Policy",
    "PolicyFile",
    "RuleSpec",
    "Rules",
    "Subject",
    "Verdict",
    "load_rules",
    "read_policy",
]
