"""Pure rules that every service shares: types, sampling, noise, latency model, errors. No I/O."""
