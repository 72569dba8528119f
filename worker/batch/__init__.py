"""Steps of the worker: builds their tensors from a StepPlan, runs plain decode steps in one call,
and reads the results back."""
