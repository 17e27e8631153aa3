"""How clients connect: accepted, counted and bounded before a byte of HTTP is read."""
