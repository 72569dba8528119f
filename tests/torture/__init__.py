"""Programs that break a running server on purpose: `python -m tests.torture.NAME --help`.

signals     kill, stop or terminate each process at each moment
kill_storm  kill the engine again and again under many clients
templates   send hostile chat templates
attacks     send hostile bodies and connections over the network
spin        kill peers and check that no survivor spins or misses a message
fuzz        send malformed messages to every socket and malformed bodies to every route
"""
