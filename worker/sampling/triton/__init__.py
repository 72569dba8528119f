"""Kernels of sampling in Triton. As with worker.kernels.triton, only code that runs on a GPU may
import these modules."""
