"""The engine both sides share: scheduling over a paged KV cache, and the runners that compute a step."""

import os

# Before torch loads its OpenMP: idle threads sleep instead of spinning. Where drafter, verifier and gateway
# share cores, spinning threads hold up whoever has work, and steps take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
