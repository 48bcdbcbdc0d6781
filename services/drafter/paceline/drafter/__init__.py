"""Drafter service: holds draft sessions and proposes tokens for the verifiers' next rounds."""
