"""What opens the memory of ranks to each other: the symmetric buffers of a module, copy engines and kernels of GPUs."""
