"""HTTP clients of the tools."""
