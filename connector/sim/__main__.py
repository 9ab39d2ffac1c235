import sys

from connector.sim.cli import main

sys.exit(main())
