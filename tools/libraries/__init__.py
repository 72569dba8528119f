"""Libraries of GPU kernels that are fetched rather than installed."""
