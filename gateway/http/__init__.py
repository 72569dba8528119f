"""HTTP: bodies, routes, errors, streams and the client's socket."""
