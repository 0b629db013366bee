"""Brute-force proof of rules: every placement of small operands, run on the parts and compared with the whole."""
