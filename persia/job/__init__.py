"""What one process holds of its job: connections, servers behind them or in this process, checkpoints."""
