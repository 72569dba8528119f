"""Data that outlives its request: stored responses and resumable streams."""
