"""K/V that other workers read, or that is read from them: bytes and leases, no decisions."""
