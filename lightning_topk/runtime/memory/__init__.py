"""The residuals that a rank keeps between steps, by parameter, in checkpoints and over skipped steps."""
