"""Pure decisions: leases, credits, windows, retries, breakers, fair shares. They take `now` and facts and own no I/O."""
