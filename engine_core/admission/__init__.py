"""Whether a request is accepted: its fields, its grammar, the limits of its account, the queue."""
