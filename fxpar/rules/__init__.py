"""For each operation, its legal layouts: checked by brute force (`fxpar.testing.check`)."""

from fxpar.rules.table import inferred, key_of, register_rule, rule_for, rule_of, rules, seeded, unregister_rule
from fxpar.signatures.engine import Labelling, Refusal, Rule, Signature, infer, partial_signatures, seed_signature
from fxpar.signatures.op_call import OpCall, bind_arguments, call_of

__all__ = [
    "Labelling",
    "OpCall",
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
    "rule_for",
    "rule_of",
    "rules",
    "seed_signature",
    "seeded",
    "unregister_rule",
]
