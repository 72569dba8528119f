"""One step: the scheduler's decisions, the plan sent to the worker, and the commit of its
result.
"""
