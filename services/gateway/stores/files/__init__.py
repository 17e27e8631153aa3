"""Tenants' files, whole and uploaded in parts."""
