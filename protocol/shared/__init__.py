"""Logic of several rooms that crosses no process boundary."""
