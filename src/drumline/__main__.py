"""`python -m drumline` is `drumline`."""

import sys

from drumline.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
