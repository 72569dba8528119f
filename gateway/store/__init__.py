"""What outlives its request: responses that are kept, and streams that can be picked up again."""
