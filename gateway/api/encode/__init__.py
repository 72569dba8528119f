"""Embeddings, reranking and scores."""
