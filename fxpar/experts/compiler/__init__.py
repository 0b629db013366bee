"""What the passes use to recognise experts and to write their rows."""
