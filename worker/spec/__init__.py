"""What a model is: its config, its dimensions and its tensors. Nothing here computes."""
