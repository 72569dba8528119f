"""Journal: all input of an engine, with its time, and a digest of each decision.

- records: the record types
- file: records in a bounded file, and reading them back
- snapshot: all that the engine remembers, which starts each later file
- recorder: an engine that records its input and its replies
- replay: replays a journal without a worker, and compares the decisions
- __main__: `python -m engine_core.journal PATH`

A journal contains the token ids of prompts and answers, so only its owner may read it.
"""
