"""Run the engine process: `python -P -m engine_core --config JSON`."""

from engine_core.process import main
from protocol.process.process_title import set_title
from protocol.process.quick_exit import quick_exit

set_title("engine")
quick_exit(main())
