"""Storage that outlives a request: stored responses and resumable streams."""
