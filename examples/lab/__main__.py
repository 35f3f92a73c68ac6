"""``python examples/lab bench NAME`` or ``reproduce NAME``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # of this folder, which is the package ``lab``
    from lab.commands import main

    main()
