"""`tidegate run-batch`: answers the lines of a file, each exactly once, however often it is killed.

The lines are read from the input twice: once to check them all, then to send them. Nothing but the
digests of their ids is held in memory. An answer is appended to the output in one piece. After an
interruption, the ids in the output show which lines are left.
"""
