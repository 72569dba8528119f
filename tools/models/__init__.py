"""The catalogue of built-in models, their download, and the check of a model before a start."""
