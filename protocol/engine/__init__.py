"""Messages between clients and the engine: commands, outputs, and their parts."""
