"""HTTP as the tools need it."""
