"""The text process of `protocol.offline.LLM`: a gateway without HTTP."""
