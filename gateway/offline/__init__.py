"""The text process of `protocol.sdk.offline.LLM`: a gateway without HTTP."""
