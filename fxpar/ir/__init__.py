"""The program: a graph with notes, and what follows from them for every value; its step, regions and stages."""
