"""What clients and the engine say to each other: commands, outputs, and their parts."""
