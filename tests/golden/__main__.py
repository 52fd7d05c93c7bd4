"""`python -m tests.golden` rewrites the counters; the commit that does so says why."""

import json

from tests.golden.replay import COUNTERS, counted

COUNTERS.write_text(json.dumps(counted(), indent=1) + "\n", "utf-8")
