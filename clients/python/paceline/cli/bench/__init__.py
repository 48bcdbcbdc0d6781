"""`paceline bench`: load on an OpenAI endpoint, and what its users saw."""

from paceline.cli.bench.command import bench

__all__ = ["bench"]
