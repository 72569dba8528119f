"""Facts about a process and its parent: exit codes, the lifeline, locks, limits, log lines."""
