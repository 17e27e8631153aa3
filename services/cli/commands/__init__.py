"""A module for each command, imported when that command is given."""
