"""Models that encode whole inputs: texts to vectors, and pairs of texts to scores."""
