"""``python -m ccssl`` is ``ccssl``."""

import sys

from ccssl.cli import main

if __name__ == "__main__":
    sys.exit(main())
