"""python -m metabayfl."""

import sys

from metabayfl.cli import main

if __name__ == "__main__":
    sys.exit(main())
