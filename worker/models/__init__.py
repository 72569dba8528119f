"""Native model families: one file each, plain tensors and functions."""
