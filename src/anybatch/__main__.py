"""`python -m anybatch`: the command line where no script is installed."""

import sys

from anybatch.cli import main

if __name__ == "__main__":
    sys.exit(main.main())
