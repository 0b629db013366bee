"""What opens the memory of ranks to each other: mailboxes of a module, copy engines and kernels of GPUs."""
