"""The engine's memory of its last steps and requests, for `GetTimeline` and `GetStatus`.

No decision depends on it, so a snapshot does not contain it. Recording a step takes constant time,
however many rows it has: the log keeps the columns of the plan, which exist anyway. They are read
only when someone asks.

steps      the last steps, equal ones in one entry
requests   the open requests, the ended ones, and who had which slot when
timeline   builds the timeline of one request from both (pure)
history    the one object that the engine calls
queue      computes the timelines that clients wait for, in slices between the steps
"""
