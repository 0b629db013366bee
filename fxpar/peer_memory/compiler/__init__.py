"""What operators copy through and what a kernel computes of rows, as the compiler and operators know it."""
