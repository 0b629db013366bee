"""What the compiler knows of pipelines: schedules, their simulation and proof, and where stages end."""
