"""OpenAI's files and batches: uploads, and requests that are computed in the background."""
