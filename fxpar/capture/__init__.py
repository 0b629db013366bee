"""Traces models: from a module and a batch to a program."""
