"""Slots: the per-request buffers that outlive a step."""
