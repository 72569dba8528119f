"""One step: the scheduler's decisions, the plan for the worker, and the commit of the result."""
