"""`python -m polymask` is `polymask`."""

import sys

from polymask.cli import main

sys.exit(main())
