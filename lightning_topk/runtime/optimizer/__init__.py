"""What is done to the user's optimizers: momentum is adapted, and their steps are watched."""
