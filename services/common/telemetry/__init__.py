"""What is timed, counted and told: spans, metrics, logs."""
