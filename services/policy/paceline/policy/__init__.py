"""The policy service: fits the latency model to what workers report and decides draft lengths and routing."""
