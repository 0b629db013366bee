"""How a module is saved and loaded: its state dicts, initial values, checkpoints, optimizer state and trainings."""
