"""The tensors of one step."""
