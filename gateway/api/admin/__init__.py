"""Routes for those who run, watch and discover a server."""
