"""Penstock's contracts. The build generates the `*_pb2` modules beside the `.proto` files."""
