"""The layers of a model in torch: embeddings, linears, MLPs, norms and rotary embeddings."""
