"""Token-level APIs: generate, tokenize, detokenize, abort."""
