"""CPU kernels in C++ and GPU kernels in Triton, a slow torch reference for each, and the code that
chooses between them."""
