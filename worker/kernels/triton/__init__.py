"""Kernels for GPUs in Triton. Importing a module of this package imports Triton, so only code that
runs on a GPU may do it."""
