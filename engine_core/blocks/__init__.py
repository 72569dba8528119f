"""K/V blocks: the pool, their content hashes, and the prefix cache."""
