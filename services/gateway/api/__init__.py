"""What may be asked, and how: bodies in OpenAI's shapes, over HTTP and over gRPC."""
