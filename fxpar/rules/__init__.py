"""For each operation, its legal layouts: data, checked by brute force (`fxpar.oracle.check`)."""

from fxpar.rules.engine import (
    Call,
    Labelling,
    Refusal,
    Rule,
    Signature,
    bind_arguments,
    call_of,
    infer,
    partial_signatures,
    seed_signature,
)
from fxpar.rules.table import inferred, key_of, register_rule, rule_of, rules, seeded, unregister_rule

__all__ = [
    "Call",
    "Labelling",
    "Refusal",
    "Rule",
    "Signature",
    "bind_arguments",
    "call_of",
    "infer",
    "inferred",
    "key_of",
    "partial_signatures",
    "register_rule",
    "rule_of",
    "rules",
    "seed_signature",
    "seeded",
    "unregister_rule",
]
