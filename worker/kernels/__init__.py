"""CPU kernels in C++, each with a slow reference in torch, and the choice between them."""
