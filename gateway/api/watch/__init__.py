"""Routes that show what the engines do now, and where the time of a request went.

routes      GET /v1/watch and GET /v1/requests/{id}/timeline
responses   the JSON of both
timelines   collects the timelines of one request from all engines
"""
