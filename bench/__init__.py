"""Measurements: workloads in, figures out."""
