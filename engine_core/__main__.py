"""Run the engine process: `python -P -m engine_core --config JSON`."""

import sys

from engine_core.process import main

sys.exit(main())
