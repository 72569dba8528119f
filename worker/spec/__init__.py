"""Descriptions of models: configs, dimensions, tensors and their shares. Nothing is computed."""
