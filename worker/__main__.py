"""Entry point of `python -P -m worker --config JSON`."""

import sys

from worker.device import environment
from worker.process import main

environment.prepare()

sys.exit(main())
