"""Model files in, tensors and a ModelCard out. Files are not trusted: no code, no pickle, every size checked."""
