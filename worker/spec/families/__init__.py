"""Model families: each reads its config.json into a ModelSpec and names its tensors."""
