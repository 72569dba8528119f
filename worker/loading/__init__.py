"""Reads model files into tensors and a ModelCard.

Files are not trusted: no code in them is run, no pickle is read, and every size is checked.
"""
