"""Models: reads their configs into specs, loads them, and computes their forward passes."""
