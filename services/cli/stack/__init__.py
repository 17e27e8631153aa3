"""All of Penstock, started, tended and ended as one."""
