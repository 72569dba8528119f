"""Facts about a process and its relatives: its parent, its limits, its exit."""
