"""Programs that stress Tidegate for longer than the tests: `python -m tests.torture.NAME --help`.

signals          kill, stop or terminate each process at each moment
kill_storm       kill the engine again and again under many clients
templates        send hostile chat templates
attacks          send hostile bodies and connections over the network
spin             kill peers and check that no survivor spins or misses a message
fuzz             send malformed messages to every socket and malformed bodies to every route
damaged          read models whose files are damaged
same_bits        compute prompts in every way and compare the bits of the answers
mutated_kernels  check that the test of the same bits fails if kernels sum in another order
examples         run the property tests with more random examples
"""
