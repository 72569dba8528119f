"""CPU kernels in C++, a slow torch reference for each, and the code that chooses between them."""
