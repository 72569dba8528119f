"""What a step computes: decisions, the plan sent to the worker, and the commit of its result."""
