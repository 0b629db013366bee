"""The text form of programs, and tables as people read them."""
