"""The edge every process shares: settings, gRPC server and clients, conversion, status codes, telemetry."""
