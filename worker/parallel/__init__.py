"""Tensor parallel groups: what one rank holds of a model, and how the ranks add their results."""
