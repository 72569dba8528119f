"""Reads model files: the weights, and everything that a model card contains.

Files are not trusted: no code in them is run, no pickle is read, and every size is checked.
"""
