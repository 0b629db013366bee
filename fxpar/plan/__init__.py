"""What the user asks: the plan, and the constants of its costs."""
