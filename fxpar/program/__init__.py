"""The program: a graph with notes, its operators, and what follows from them for every value."""
