"""One step: what it computes, the plan for the worker, and the commit of the result."""
