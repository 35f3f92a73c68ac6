"""What a rank keeps between steps, by parameter: residuals, in checkpoints and over skipped steps."""
