"""The K/V cache, and the movement of its bytes: to and from other workers and the tiers. The engine
makes all decisions."""
