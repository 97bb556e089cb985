"""The loop around the step: rows, metrics, learning rate, checkpoints, logs and the trainer."""
