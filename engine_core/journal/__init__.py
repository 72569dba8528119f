"""An engine's history: everything that came in, with its time, and a digest of what it decided.

    records   what is written down
    file      records in a file, bounded, and read back
    state     all that an engine is, as data, with which a later file begins
    recorder  an engine that writes down what it is told and what it says
    replay    the same again, without workers: is it decided the same?
    command   `python -m engine_core.journal FILE`

A journal has token ids, which are what people wrote and were told: it is for its owner alone.
"""
