"""Imported before any test: the engine sets how torch's threads wait, which must be before torch loads."""

import paceline.engine  # noqa: F401
