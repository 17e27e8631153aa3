"""The public gRPC interface."""
