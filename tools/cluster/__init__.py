"""Places the engines of `tidegate serve --cluster` on the nodes of a Ray cluster."""
