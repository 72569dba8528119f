"""Run the engine process: `python -P -m engine_core --config JSON`."""

from engine_core.process import main
from protocol.process.quick_exit import quick_exit

quick_exit(main())
