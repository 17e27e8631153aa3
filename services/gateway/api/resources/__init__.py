"""What tenants keep, as the API has it: read, done and told the same over REST and gRPC."""
