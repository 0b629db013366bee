"""The operators on experts' rows, and their kernels. Importing any of them registers all."""

from fxpar.experts.operators import grouped, permute, replicas  # noqa: F401 - operators of torch
from fxpar.experts.operators.replicated_weights import replicate_experts, return_replicas
from fxpar.experts.operators.selective_dispatch import expand_needed, sum_needed
from fxpar.experts.operators.sent_rows import return_rows, send_rows, split_sizes
from fxpar.ops.registry import register

register(split_sizes, send_rows, return_rows, expand_needed, sum_needed, replicate_experts, return_replicas)
