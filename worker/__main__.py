"""Entry point of `python -P -m worker --config JSON`."""

from protocol.process.quick_exit import quick_exit
from worker.device import environment
from worker.process import main

environment.prepare()

quick_exit(main())
