"""Model files in, tensors and a ModelCard out.

Files are not trusted: no code of theirs runs, no pickle is read, every size is checked.
"""
