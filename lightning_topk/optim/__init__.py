"""What makes a delivered gradient count as in dense training: momentum, learning rates and clipping."""
