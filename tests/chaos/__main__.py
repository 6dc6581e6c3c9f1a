"""`python -m chaos`: see command."""

import sys

from chaos.command import main

if __name__ == "__main__":
    sys.exit(main())
