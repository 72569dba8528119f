"""Journal: all input of an engine with its time, and a digest of each reply.

- records: the record types
- file: writes records to bounded files, and reads them back
- snapshot: converts the state of an engine to plain data and back; each file but the first starts
  with a snapshot
- recorder: an engine that records its input and the digests of its replies
- replay: replays a journal without a worker, and compares the replies
- __main__: the command `python -m engine_core.journal PATH`

A journal contains the token ids of prompts and answers, so only its owner can read it.
"""
