"""From a module and a batch to a program.

Enters: an unmodified `nn.Module` (on any device, `meta` too), an example batch and a plan. Leaves: the `Program` over
global shapes and the `CallSpec` of its calls. Nothing is computed and no weight is touched.
"""
