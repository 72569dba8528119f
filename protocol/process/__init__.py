"""What a process knows of itself and of its relatives: its parent, its limits, its exit."""
