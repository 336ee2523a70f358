"""``python -m tests.checkpoint --kills 200 --seed 0`` kills ranks at random moments."""

from __future__ import annotations

import argparse
import sys

from tests.checkpoint.kills import kill_at_random

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--kills", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
sys.exit(not kill_at_random(options.kills, options.seed, show=True).good)
