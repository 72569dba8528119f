"""Entry point of `python -P -m worker --config JSON`."""

import sys

from worker.process import main
from worker.startup import environment

environment.prepare()

sys.exit(main())
