"""Kernels for the CPU in C++, each with its slow twin in torch, and the choice between them."""
