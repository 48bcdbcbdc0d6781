"""The gateway: OpenAI and gRPC APIs, Redis admission, dispatch to verifiers."""
