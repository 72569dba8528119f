"""What the generated text means: push machines from token ids to events, one chain per choice."""
