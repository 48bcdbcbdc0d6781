"""The engine both sides share: scheduling over a paged KV cache, and the runners that compute a step."""
