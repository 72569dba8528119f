"""Journal: all input of an engine with its time, and a digest of each reply.

- records: the record types
- file: writes records to bounded files, and reads them back
- snapshot: the state of an engine as plain data; each file but the first starts with a snapshot
- capture, restore: an engine to a snapshot, and back
- recorder: an engine that records its input and the digests of its replies
- replay: replays a journal without a worker, and compares the replies
- __main__: the command `python -m engine_core.journal PATH`

A journal contains the token ids of prompts and answers, so only its owner can read it.
"""
